"""Records to understand an approximation by: error curves, Pareto fronts, spectra, limits, grids of layers."""

from lsrdecomp.analysis.curves import ErrorCurve as ErrorCurve
from lsrdecomp.analysis.curves import error_curve as error_curve
from lsrdecomp.analysis.curves import error_curves as error_curves
from lsrdecomp.analysis.curves import low_rank_curve as low_rank_curve
from lsrdecomp.analysis.curves import solver_curve as solver_curve
from lsrdecomp.analysis.frames import to_frame as to_frame
from lsrdecomp.analysis.layers import LayerGrid as LayerGrid
from lsrdecomp.analysis.layers import layer_grid as layer_grid
from lsrdecomp.analysis.limits import Limit as Limit
from lsrdecomp.analysis.limits import gaussian_limit as gaussian_limit
from lsrdecomp.analysis.pareto import ParetoPoint as ParetoPoint
from lsrdecomp.analysis.pareto import pareto_front as pareto_front
from lsrdecomp.analysis.spectra import Spectrum as Spectrum
from lsrdecomp.analysis.spectra import rearranged_spectrum as rearranged_spectrum
