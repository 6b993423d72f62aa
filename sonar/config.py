"""Settings of an engine: frozen dataclasses, composed, checked at construction. Torch-free.

`auto` values are resolved once into a new object (`sonar.worker.resolve`), printed, and never looked at again.
Cluster-wide settings (replicas, pools, network) live in `cluster.config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from sonar.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
ActivationMode = Literal["auto", "float32", "int8"]
KVTransport = Literal["none", "nixl", "shm"]


class LayerKind(Enum):
    """What a layer keeps of the past: decides the layout and the life time of its cache blocks."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer kind.

    Attributes:
        theta: base frequency.
        dim: rotated dimensions of a head (head_dim x partial_rotary_factor).
        scaling: "none", "linear", "llama3" or "yarn".
        parameters: the scaling's own numbers, named as in Hugging Face's `rope_parameters`.
    """

    theta: float
    dim: int
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    parameters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts in a model's sparse layers.

    Attributes:
        top_k: experts a token. intermediate_size: of one expert. shared_intermediate_size: of the experts that every
            token goes through, taken together; 0 = none. Of a rank's shard both are the rank's own.
        sparse_layers: layers with experts; the others have a dense MLP.
        scoring: "softmax", "sigmoid" or "softmax_of_chosen", as `sonar.ops.table.Scoring`.
        renormalize, scale, num_groups, top_groups, group_best: as in `sonar.ops.table.RoutingSpec`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: frozenset[int]
    shared_intermediate_size: int = 0
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"{self.top_k} experts a token of {self.num_experts}; give 1 to {self.num_experts}")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"{self.top_groups} of {self.num_groups} groups of {self.num_experts} experts; groups are equal"
            )
        if self.top_groups * (self.num_experts // self.num_groups) < self.top_k:
            raise ConfigError(f"{self.top_groups} groups hold fewer than {self.top_k} experts")


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: keys and values of all heads come from one latent vector a token.

    Attributes:
        q_lora_rank: of the queries' latent; 0 = queries come from the hidden state.
        kv_lora_rank: of the cached latent. qk_nope_head_dim, qk_rope_head_dim: a head's dimensions without and with
            rotation; their sum is `ModelConfig.head_dim`. v_head_dim: of a head's values.
        is_interleaved: rotated pairs are neighbours in the checkpoint, not halves apart.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    is_interleaved: bool = True


class CacheShape(NamedTuple):
    """What a layer caches of a token: planes (K and V, or one latent for both), heads, numbers of a head."""

    num_planes: int
    num_heads: int
    dim: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model's shape, from `config.json` or GGUF metadata; independent of its weights' format.

    Attributes:
        architecture: key of `sonar.models.registry`, e.g. "llama".
        layer_kinds: one per layer. sliding_window: tokens seen by a SLIDING layer, itself included; 0 when none is.
        rope: per layer kind; empty when positions are learned (gpt2).
        eos_token_ids: ids that end a sequence, from `generation_config.json` first.
        dtype: of the stored weights, "float32" | "bfloat16" | "float16".
        extra: numbers only one family needs (softcap, query scalar, ...), read by that family's file alone.
        stage: first layer and the one after the last that this rank computes; None = all. Of a rank's shard of a model
            (`sonar.distributed.shard_map`) heads and intermediate size are the rank's own too.
        moe: the experts; None in dense models. mla: latent attention; None where K and V are cached head by head.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    layer_kinds: tuple[LayerKind, ...]
    rope: dict[LayerKind, RopeConfig]
    sliding_window: int = 0
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    quantization: str | None = None
    extra: dict[str, float] = field(default_factory=dict)
    stage: tuple[int, int] | None = None
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None

    @property
    def cache_shape(self) -> CacheShape:
        """What a layer caches of a token."""
        if self.mla is not None:
            return CacheShape(1, 1, self.mla.kv_lora_rank + self.mla.qk_rope_head_dim)
        return CacheShape(2, self.num_kv_heads, self.head_dim)

    @property
    def layers(self) -> range:
        """Layers that this rank computes."""
        return range(*(self.stage or (0, self.num_layers)))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.layers.stop == self.num_layers

    def __post_init__(self) -> None:
        if len(self.layer_kinds) != self.num_layers:
            raise ConfigError(f"layer_kinds has {len(self.layer_kinds)} entries for {self.num_layers} layers")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        if LayerKind.SLIDING in self.layer_kinds and self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window} with sliding layers; give the window in tokens")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens a block.
        memory_bytes: for all blocks of one rank; 0 = auto (a share of free memory, see `memory_share`).
        memory_share: of the device's (or, on a CPU, the host's available) memory that weights, activations and cache
            may use together when memory_bytes is 0.
        dtype: of keys and values; auto = the compute dtype.
    """

    block_size: int = 16
    memory_bytes: int = 0
    memory_share: float = 0.9
    enable_prefix_caching: bool = True
    dtype: DType = "auto"

    def __post_init__(self) -> None:
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(f"block_size={self.block_size}; choose 8, 16, 32, 64 or 128", param="block_size")
        if not 0.05 <= self.memory_share <= 0.98:
            raise ConfigError(f"memory_share={self.memory_share}; choose 0.05 to 0.98", param="memory_share")
        if self.memory_bytes < 0:
            raise ConfigError(f"memory_bytes={self.memory_bytes} is negative; 0 means auto", param="memory_bytes")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of the queue.

    Attributes:
        max_num_requests: requests computed in one step; also the number of slots a worker holds.
        max_step_tokens: token budget of a step, prefill and decode together; 0 = auto, by device (the chunk of a prompt
            holds up every stream).
        max_waiting: requests held waiting; one more is refused with `CapacityError`.
        max_model_len: prompt + output tokens of a request; 0 = the model's own limit.
        overlap: schedule step N+1 while N runs.
    """

    max_num_requests: int = 256
    max_step_tokens: int = 0
    max_waiting: int = 4096
    max_model_len: int = 0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_num_requests", 1), ("max_step_tokens", 0), ("max_waiting", 1), ("max_model_len", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}; must be at least {least}", param=name)
        if 0 < self.max_step_tokens < self.max_num_requests:
            raise ConfigError(
                f"max_step_tokens={self.max_step_tokens} is below max_num_requests={self.max_num_requests}: "
                "a step could not decode every request; raise it",
                param="max_step_tokens",
            )


@dataclass(frozen=True)
class ParallelConfig:
    """This rank's place in its replica: rank = (stage x num_groups + data-parallel group) x tp_size + rank within the
    group's stage.

    Attributes:
        tp_size: ranks that share every layer. pp_size: stages that share out the layers.
        pp_layers: layers of each stage; empty = balanced by the bytes of their weights.
        dp_size: groups that each compute requests of their own. With ep_size 1 they are as many replicas, which know
            nothing of each other; else the groups of one replica, which take their steps together.
        ep_size: ranks that share out each layer's experts: all dp_size x tp_size of a stage, or 1: each holds a part of
            every expert, or all.
        redundant_experts: places beside one for each expert, for second copies of those most in use.
        rebalance_steps: steps after which experts move to where their load is even; 0 = never.
        rank: in [0, world_size); set by whoever starts the worker.
    """

    tp_size: int = 1
    pp_size: int = 1
    pp_layers: tuple[int, ...] = ()
    dp_size: int = 1
    ep_size: int = 1
    redundant_experts: int = 0
    rebalance_steps: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "dp_size", "ep_size"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ConfigError(f"{name}={getattr(self, name)}; choose 1 to 1024", param=name)
        self._check_experts()
        if self.pp_layers and (len(self.pp_layers) != self.pp_size or min(self.pp_layers) < 1):
            raise ConfigError(
                f"pp_layers={list(self.pp_layers)} for pp_size={self.pp_size}; give each stage its number of layers",
                param="pp_layers",
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} of {self.world_size} ranks; count from 0", param="rank")

    def _check_experts(self) -> None:
        if self.ep_size not in (1, self.dp_size * self.tp_size):
            raise ConfigError(
                f"ep_size={self.ep_size} with dp_size={self.dp_size} and tp_size={self.tp_size}; all of these ranks "
                f"share out the experts, or none: choose {self.dp_size * self.tp_size} or 1",
                param="ep_size",
            )
        for name in ("redundant_experts", "rebalance_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative; 0 means none", param=name)
            if getattr(self, name) and self.ep_size == 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} without expert parallelism; give ep_size, or leave it at 0",
                    param=name,
                )

    @property
    def num_replicas(self) -> int:
        """Replicas that the data-parallel groups make."""
        return self.dp_size if self.ep_size == 1 else 1

    @property
    def num_groups(self) -> int:
        """Data-parallel groups of one replica, which take their steps together."""
        return self.dp_size // self.num_replicas

    @property
    def stage_size(self) -> int:
        """Ranks of a stage, over all groups."""
        return self.num_groups * self.tp_size

    @property
    def world_size(self) -> int:
        """Ranks of the replica."""
        return self.stage_size * self.pp_size

    @property
    def group(self) -> int:
        """Data-parallel group."""
        return self.rank // self.tp_size % self.num_groups

    @property
    def tp_rank(self) -> int:
        """Place among the ranks of a stage."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """Stage."""
        return self.rank // self.stage_size


@dataclass(frozen=True)
class EngineConfig:
    """Everything one replica needs to start.

    Attributes:
        model: folder, `.gguf` file, hub id or alias.
        load_format: "auto" reads weights; "dummy" makes random ones of the right shapes.
        threads: CPU threads; 0 = as many as the process may use.
        activations: what quantized weights are multiplied with on a CPU: "float32" (exact), or "int8" (8 bits with a
            scale for each 32 numbers, in integer arithmetic: several times faster; its cost in perplexity is in
            benchmarks/RESULTS.md). auto: int8 where the weights are quantized and the compiled kernels installed.
        kv_transfer: how KV blocks move between this deployment's replicas: "nixl" within and between hosts, "shm"
            within a host. kv_checksums: each block is verified after it was read.
    """

    model: str
    revision: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    threads: int = 0
    activations: ActivationMode = "auto"
    seed: int = 0
    kv_transfer: KVTransport = "none"
    kv_checksums: bool = False
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"threads={self.threads} is negative; 0 means as many as there are CPUs", param="threads")
        if self.kv_transfer != "none":
            self._check_transfer()

    def _check_transfer(self) -> None:
        """Refuses what blocks cannot be moved for."""
        given = f"kv_transfer={self.kv_transfer!r}"
        if self.parallel.world_size > 1:
            problem = f"{given} with {self.parallel.world_size} ranks a replica; leave tp and pp at 1"
        elif not self.cache.enable_prefix_caching:
            problem = f"{given} without prefix caching, by which moved blocks are found; leave that on"
        elif self.device == "cuda":
            problem = f"{given} with device='cuda'; blocks move between replicas on a CPU only"
        else:
            return
        raise ConfigError(problem, param="kv_transfer")
