"""One budget over all layers: the allocation of `lsrdecomp.formats.allocation`, its parts being layers here."""

from lsrdecomp.formats.allocation import Choice as Choice
from lsrdecomp.formats.allocation import Options as Options
from lsrdecomp.formats.allocation import total_cost as total_cost
from lsrdecomp.formats.allocation import total_loss as total_loss
from lsrdecomp.formats.allocation import within_cost as within_cost
from lsrdecomp.formats.allocation import within_loss as within_loss
