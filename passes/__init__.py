"""The passes, one file each, in the order in which they run (`moec.compiler` says why)."""

from moec.passes.base import Pass, parse_pass
from moec.passes.cache_experts import CacheExperts
from moec.passes.choose_exchange import ChooseExchange
from moec.passes.choose_kernels import ChooseKernels
from moec.passes.chunk_tokens import ChunkTokens
from moec.passes.fuse_experts import FuseExperts
from moec.passes.fuse_gate_up import FuseGateUp
from moec.passes.infer_shapes import InferShapes
from moec.passes.insert_exchange import InsertExchange
from moec.passes.join_shared import JoinShared
from moec.passes.merge_linears import MergeLinears
from moec.passes.pair_experts import PairExperts
from moec.passes.place_experts import PlaceExperts
from moec.passes.place_prefetch import PlacePrefetch
from moec.passes.plan_memory import PlanMemory
from moec.passes.plan_overlap import PlanOverlap
from moec.passes.schedule import Schedule
from moec.passes.shard_attention import ShardAttention
from moec.passes.shard_experts import ShardExperts
from moec.passes.split_stages import SplitStages
from moec.passes.split_tokens import SplitTokens

PASSES: tuple[type[Pass], ...] = (
    SplitStages,
    PlaceExperts,
    InferShapes,
    ShardAttention,
    SplitTokens,
    ShardExperts,
    ChooseExchange,
    PlanOverlap,
    ChunkTokens,
    InsertExchange,
    FuseGateUp,
    MergeLinears,
    CacheExperts,
    JoinShared,
    FuseExperts,
    PairExperts,
    PlacePrefetch,
    Schedule,
    PlanMemory,
    ChooseKernels,
)

__all__ = ["PASSES", "Pass", "parse_pass"]
