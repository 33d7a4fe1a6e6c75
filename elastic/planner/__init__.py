"""Memory and step time of a training job, predicted before it starts: which mesh and strategy fit and are fastest.

Pure: standard library and the core's errors only. docs/planner.md says what is modelled and how large the error is.
"""

from elastic.planner.cost_model import Constants, CostModel, TimeBreakdown, fit_constants, priors_around
from elastic.planner.devices import DEVICES, Cluster, Device, parse_cluster
from elastic.planner.laws import optimum, shape_of
from elastic.planner.links import Link, fit_link
from elastic.planner.memory_model import BufferSizes, MemoryBreakdown, MemoryModel
from elastic.planner.model_shape import MODELS, ModelShape, parse_model
from elastic.planner.search import AXES, Candidate, Planner, PlanningFacts, refusals
from elastic.planner.states import DTYPES, Dtypes, state_bytes
from elastic.planner.strategy import Mesh, Strategy
from elastic.planner.workload import Workload, workload

__all__ = [
    "AXES",
    "DEVICES",
    "DTYPES",
    "MODELS",
    "BufferSizes",
    "Candidate",
    "Cluster",
    "Constants",
    "CostModel",
    "Device",
    "Dtypes",
    "Link",
    "MemoryBreakdown",
    "MemoryModel",
    "Mesh",
    "ModelShape",
    "Planner",
    "PlanningFacts",
    "Strategy",
    "TimeBreakdown",
    "Workload",
    "fit_constants",
    "fit_link",
    "optimum",
    "parse_cluster",
    "parse_model",
    "priors_around",
    "refusals",
    "shape_of",
    "state_bytes",
    "workload",
]
