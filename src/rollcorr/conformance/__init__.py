"""The conformance suite: fifteen properties of any function that corrects rollouts, with the smallest counterexample.

batches            batches as rows of tokens: drawn, padded and made smaller
function_calls     one call of the function under test
properties         the fifteen properties, each with the float64 arithmetic that it expects
suite              the grades of a function
own_correction     this library's `correct` in the suite's form
"""

from rollcorr.conformance.own_correction import own_correction
from rollcorr.conformance.properties import PROPERTIES, Property
from rollcorr.conformance.suite import Grade, grade_function, grade_property

__all__ = ["PROPERTIES", "Grade", "Property", "grade_function", "grade_property", "own_correction"]
