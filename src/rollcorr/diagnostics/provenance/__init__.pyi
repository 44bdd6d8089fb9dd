from .estimate import estimate_provenance as estimate_provenance
from .provenance_findings import Provenance as Provenance
