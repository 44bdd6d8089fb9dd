"""Score logged rows again with the trainer's weights, to find which change of the scoring explains a mismatch.

variants        the changes: context, precision, temperature, penalties, truncation, shift
confirmation    the rows to score, the excess that each variant removes, and the verdict
"""

from rollcorr.confirm.confirmation import Confirmation, SideResult, confirm

__all__ = ["Confirmation", "SideResult", "confirm"]
