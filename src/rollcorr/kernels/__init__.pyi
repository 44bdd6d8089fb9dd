from .correction import implementations as implementations
from .correction import warm as warm
from .linear_logprob import linear_log_prob as linear_log_prob
