from .mismatch_profile import MismatchProfile as MismatchProfile
from .null_file import MismatchNull as MismatchNull
from .null_file import NullMismatchError as NullMismatchError
from .null_file import read_null as read_null
from .origin import Origin as Origin
from .row_table import RowTable as RowTable
from .token_share import TokenShare as TokenShare
from .token_share import TokenSums as TokenSums
