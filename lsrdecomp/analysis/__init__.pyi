# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .error_curves import ErrorCurve as ErrorCurve
from .error_curves import error_curve as error_curve
from .error_curves import error_curves as error_curves
from .error_curves import low_rank_curve as low_rank_curve
from .error_curves import solver_curve as solver_curve
from .layer_figures import LayerGrid as LayerGrid
from .layer_figures import layer_grid as layer_grid
from .limits import Limit as Limit
from .limits import gaussian_limit as gaussian_limit
from .pareto import ParetoPoint as ParetoPoint
from .pareto import pareto_front as pareto_front
from .spectra import Spectrum as Spectrum
from .spectra import rearranged_spectrum as rearranged_spectrum
