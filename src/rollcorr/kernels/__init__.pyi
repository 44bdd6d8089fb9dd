from .correction import correction_kernel as correction_kernel
from .correction import implementations as implementations
from .correction import warm as warm
from .linear_logprob import LinearLogProb as LinearLogProb
from .linear_logprob import linear_log_prob as linear_log_prob
