/* Sums over tokens that only become a row: a new one is a line here. Each line has the name of its row, what a vector of
   tokens adds in float32, and what one token adds in float64 to a block that float32 sums do not hold. Both are 0 where
   d is 0, as it is on tokens that are not measured. A sum over compared tokens also counts those of probability zero, in
   describe_sequence. */

#ifndef ROLLCORR_TOKEN_SUMS_H
#define ROLLCORR_TOKEN_SUMS_H

#define SUMS_OF_D(X) /* of d and size, which is |d| */ \
    X(abs_log_ratio, size, size)

#define SUMS_OF_RATIO(X) /* of d, its exponential e (e.exp, e.expm1, e.k3: vectors only), and |π − μ| of compared tokens */ \
    X(prob_diff_abs, difference, difference)

#define TOKEN_SUMS(X) SUMS_OF_D(X) SUMS_OF_RATIO(X)

/* What a sum is in C: a field, the name of its total, a vector in a loop and what that adds. */
#define AS_FIELD(name, ...) double name;
#define AS_TOTAL(name, ...) TOTAL_##name,
#define AS_VECTOR(name, ...) vf sum_of_##name = {0};
#define ADD_VECTOR(name, vector, scalar) sum_of_##name += vector;
#define ADD_SCALAR(name, vector, scalar) wide.name += scalar;

#endif
