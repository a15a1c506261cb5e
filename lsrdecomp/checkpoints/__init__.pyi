# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .bundle import CONFIG as CONFIG
from .format_table import FORMATS as FORMATS
from .format_table import open_checkpoint as open_checkpoint
from .output_paths import check_file as check_file
from .output_paths import check_output as check_output
from .output_paths import check_place as check_place
from .records import Checkpoint as Checkpoint
from .records import LoraLayer as LoraLayer
from .records import LsrLayer as LsrLayer
from .statistics import read_statistics as read_statistics
from .tensors import StoredTensor as StoredTensor
from .writers.diffusers import write_diffusers as write_diffusers
from .writers.kohya import write_kohya as write_kohya
from .writers.lsr import write_lsr as write_lsr
from .writers.peft import write_lora as write_lora
from .writing import WEIGHTS as WEIGHTS
from .writing import new_file as new_file
