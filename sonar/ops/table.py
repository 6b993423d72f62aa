"""The boundary between the engine and its kernels: what each op takes, returns and promises.

A backend (`sonar.ops.registry`) fills an `OpTable` once at start, by device; whatever it lacks it takes from the torch
reference. Models and the sampler get the table handed in and call nothing else. Called by layers, models, worker. Knows
nothing of requests.

Legend of shape suffixes: T tokens of the step, R requests of the step, S rows sampled from, D hidden, F intermediate
(of this rank), H query heads, G kv heads, E head_dim, V vocabulary, N out features, K in features, B blocks of the
longest table, P positions, L layers of the cache group, Z block size. Of mixtures of experts: X experts (X1 = X + 1), J
experts a token, M rows sorted by expert. Of latent attention: C latent dimensions, R rotated ones.

**Numerics every backend owes on the CPU, and on a GPU in deterministic mode**: the value of an output row depends on
that row's inputs alone: not on T, on the other rows, on how a prompt was cut into chunks, or on whether its past was
computed or cached. (The torch reference does not promise this.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor


class Activation(Enum):
    """Elementwise non-linearities. GELU_TANH is the tanh approximation (gpt2's gelu_new, gemma's gelu_pytorch_tanh)."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class PlainMatrix:
    """A dense weight as stored: weight_NK in float32, bfloat16 or float16, contiguous, on the CPU or the device."""

    weight_NK: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight_NK.shape[0], self.weight_NK.shape[1]


@dataclass(frozen=True)
class GGUFMatrix:
    """A GGUF-quantized weight as stored: rows of blocks.

    Attributes:
        raw_NX: uint8 of shape (N, bytes a row); may be a view of a memory-mapped file: read-only.
        type_name: GGML type, e.g. "Q4_1".
        num_columns: K.
    """

    raw_NX: Tensor
    type_name: str
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.raw_NX.shape[0], self.num_columns


Matrix = PlainMatrix | GGUFMatrix


class Scoring(Enum):
    """How a router's logits become weights. SOFTMAX and SIGMOID score all experts, then choose; SOFTMAX_OF_CHOSEN
    chooses by the logits, then takes the softmax of those J."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"


@dataclass(frozen=True)
class RoutingSpec:
    """How a token's experts are chosen and weighed.

    Attributes:
        top_k: J. renormalize: divide the chosen weights by their sum (+ 1e-20). scale: multiplies them after that.
        num_groups, top_groups: experts lie in num_groups equal runs, and only those of the best top_groups are chosen
            from; 1, 1 = off.
        group_best: a group's score is the sum of its so many best (scores with bias).
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt_oss's unit: g = min(gate, limit), u = clamp(up, -limit, limit); (u + 1) * g * sigmoid(alpha * g)."""

    alpha: float = 1.702
    limit: float = 7.0


ExpertActivation = Activation | ClampedSwiglu
"""An Activation means activation(gate) * up."""


@dataclass(frozen=True)
class ExpertOrder:
    """A step's (token, choice) pairs sorted by expert, those of one expert by token; M = T * J.

    Attributes:
        tokens_M: int64, the token of each row. offsets_X1: int32, first row of each expert, then M.
        places_TJ: int64, the row of each token's j-th choice.
    """

    tokens_M: Tensor
    offsets_X1: Tensor
    places_TJ: Tensor


LinearFn = Callable[[Tensor], Tensor]
"""x_TK -> y_TN in x's dtype (y = x W^T + bias)."""
EmbeddingFn = Callable[[Tensor], Tensor]
"""token_ids_T (int64) -> x_TD in the compute dtype."""
ExpertsFn = Callable[[Tensor, Tensor], Tensor]
"""(x_MD sorted by expert, offsets_X1 int32 on the same device) -> y_MD in x's dtype. M may be 0, experts may have no
rows. Knows nothing of tokens and routing weights. A row's bits depend on that row and its expert alone."""
HeadLinearFn = Callable[[Tensor], Tensor]
"""x_THK (any strides, contiguous K) -> y_THN, contiguous: head h by its own matrix."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Where one cache group's requests read and write in this step; same device as the activations.

    Attributes:
        block_table_RB: int32, block ids of each request; only entries a request's window touches are read, the rest is
            arbitrary.
        slot_mapping_T: int64, block_id * block_size + offset where each token's K and V go.
        query_start_R1: int32 of shape (R + 1,), first token row of each request.
        seq_lens_R: int32, tokens of each request after this step (past + this step's).
        num_decodes: the first num_decodes requests have one query token each.
        max_query_len, max_seq_len: upper bounds over the requests, on the host.
    """

    block_table_RB: Tensor
    slot_mapping_T: Tensor
    query_start_R1: Tensor
    seq_lens_R: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class AttentionSpec:
    """What is constant for a layer. window: 0 = full; else a token sees itself and the window-1 before it.
    softcap: 0 = off; else scores become softcap * tanh(score / softcap)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class SamplingTensors:
    """Per row settings of a draw, on the logits' device.

    Attributes:
        temperature_S: float32; 0 = greedy row.
        top_k_S: int32; 0 = off. top_p_S, min_p_S, typical_p_S: float32; 1, 0, 1 = off.
        key_S2: int64 holding two unsigned 32-bit words, `sonar.ops.draw_key.draw_key(seed, position)`.
        all_greedy: no row draws; the rest is not read.
        any_filter: some row has one of top_k, top_p, min_p, typical_p on.
    """

    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    typical_p_S: Tensor
    key_S2: Tensor
    all_greedy: bool
    any_filter: bool


class RmsNormFn(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32, returned in x's dtype."""

    def __call__(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...


class AddRmsNormFn(Protocol):
    """residual += x (in place, in residual's dtype); returns rms_norm(residual)."""

    def __call__(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...


class LayerNormFn(Protocol):
    """LayerNorm with bias over the last dimension, computed in float32."""

    def __call__(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor: ...


class RopeKVWriteFn(Protocol):
    """Splits qkv, normalizes Q and K per head (when weights are given), rotates them, writes K and V to the cache.

    Args:
        qkv_TX: (T, (H + 2 G) * E): Q heads, K heads, V heads.
        positions_T: int64.
        cos_sin_PR: float32 (P, rotary_dim): cosines of the rotary_dim / 2 frequencies, then sines; None = no rotation.
            Pairs are (i, i + rotary_dim / 2) of a head ("neox"); dimensions from rotary_dim on pass through.
        q_norm_E, k_norm_E: RMSNorm weights per head before the rotation, or None.
        kv_cache: (num_blocks, 2, G, Z, E), a view with any strides but a contiguous E; written at slot_mapping_T.
    Returns:
        q_THE: (T, H, E), contiguous.
    """

    def __call__(
        self,
        qkv_TX: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor | None,
        q_norm_E: Tensor | None,
        k_norm_E: Tensor | None,
        norm_eps: float,
        kv_cache: Tensor,
        slot_mapping_T: Tensor,
        spec: AttentionSpec,
    ) -> Tensor: ...


class PagedAttentionFn(Protocol):
    """Causal attention of this step's queries over each request's cached tokens (this step's are already written).

    Args:
        q_THE: (T, H, E). kv_cache: as in `RopeKVWriteFn`. sinks_H: one more logit a head in the softmax's
            denominator, or None.
    Returns:
        (T, H * E), contiguous, q's dtype.
    """

    def __call__(
        self,
        q_THE: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None = None,
    ) -> Tensor: ...


class GatedActivationFn(Protocol):
    """gate_up_TF2 (T, 2 F) -> activation(first half) * second half, (T, F)."""

    def __call__(self, gate_up_TF2: Tensor, activation: Activation) -> Tensor: ...


class ActivationFn(Protocol):
    """Elementwise, same shape and dtype."""

    def __call__(self, x_TF: Tensor, activation: Activation) -> Tensor: ...


class LinearFactory(Protocol):
    """Prepares a linear layer from stored matrices stacked along N (e.g. q, k, v), each in its own format.

    Packs, casts and moves once, here; the returned function only computes. bias_N: float, or None.
    """

    def __call__(self, parts: Sequence[Matrix], bias_N: Tensor | None) -> LinearFn: ...


class RouteFn(Protocol):
    """Chooses and weighs each token's experts.

    Args:
        logits_TX: the router's; scored in float32.
        bias_X: float32, added to the scores for the choice (of groups too), not to the weights; or None.
    Returns:
        expert_ids_TJ int64 and weights_TJ float32, by falling choice score, equal ones by rising id (of groups too). A
        token's choice depends on its own logits alone. No host wait.
    """

    def __call__(self, logits_TX: Tensor, bias_X: Tensor | None, spec: RoutingSpec) -> tuple[Tensor, Tensor]: ...


class SortByExpertFn(Protocol):
    """The order in which rows go through the experts; no host wait. Ids lie in 0 .. num_experts - 1."""

    def __call__(self, expert_ids_TJ: Tensor, num_experts: int) -> ExpertOrder: ...


class WeightedSumFn(Protocol):
    """Each token's experts added up: out[t] = ((w_t0 y[p_t0]) + w_t1 y[p_t1]) + ..., in float32 in the order of the
    choices, every product rounded before it is added; rounded once to y's dtype.

    Args:
        y_MD: rows of experts. places_TJ: int64. weights_TJ: float32.
    Returns:
        (T, D), contiguous.
    """

    def __call__(self, y_MD: Tensor, places_TJ: Tensor, weights_TJ: Tensor) -> Tensor: ...


class ExpertsFactory(Protocol):
    """Prepares the gated MLPs of this rank's experts: down(unit(gate_up(x))), each expert by its own matrices.

    Args:
        gate_up: per expert, matrices stacked along N to 2 F rows, the gate's F first: [gate, up] or one fused. All
            experts alike in shapes and formats, as a rule; a backend copes with mixed formats or raises `ModelError`.
        down: per expert (D, F).
        gate_up_bias_XF, down_bias_XD: (X, 2 F) and (X, D), or None.
    """

    def __call__(
        self,
        gate_up: Sequence[Sequence[Matrix]],
        down: Sequence[Matrix],
        activation: ExpertActivation,
        gate_up_bias_XF: Tensor | None = None,
        down_bias_XD: Tensor | None = None,
    ) -> ExpertsFn: ...


class HeadLinearFactory(Protocol):
    """Prepares one product a head from H matrices (N, K) of one shape."""

    def __call__(self, matrices: Sequence[Matrix]) -> HeadLinearFn: ...


class LatentWriteFn(Protocol):
    """Latent attention's counterpart of `RopeKVWriteFn`: normalizes the latent, rotates queries and key, writes.

    Args:
        q_rope_THR: the queries' rotated dimensions, any strides but a contiguous R.
        latent_TX: (T, C + R): latent before its norm, then the key's rotated dimensions, shared by all heads.
        norm_C: RMSNorm weight. cos_sin_PR: as in `RopeKVWriteFn`, over R.
        kv_cache: (num_blocks, 1, 1, Z, C + R); norm(latent), then the rotated key.
    Returns:
        the queries' dimensions rotated, (T, H, R).
    """

    def __call__(
        self,
        q_rope_THR: Tensor,
        latent_TX: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor,
        norm_C: Tensor,
        norm_eps: float,
        kv_cache: Tensor,
        slot_mapping_T: Tensor,
    ) -> Tensor: ...


class LatentAttentionFn(Protocol):
    """`PagedAttentionFn` where one vector a token is key and, in its first C dimensions, value of all heads.

    Args:
        q_THX: (T, H, C + R). kv_cache: as in `LatentWriteFn`.
        spec: num_kv_heads 1, head_dim C + R. value_dim: C.
    Returns:
        (T, H, C), q's dtype, any strides but a contiguous C.
    """

    def __call__(
        self, q_THX: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec, value_dim: int
    ) -> Tensor: ...


class EmbeddingFactory(Protocol):
    """Prepares a look-up of rows of a stored matrix (V, D)."""

    def __call__(self, table: Matrix) -> EmbeddingFn: ...


class SampleFn(Protocol):
    """Draws one token a row; a pure function of the row's logits, settings and key.

    Order: divide by temperature -> top_k -> min_p (drop p < min_p * max p) -> typical_p (sort by |-ln p - H|, keep the
    smallest set of mass >= typical_p) -> top_p (smallest set of the most likely of mass >= top_p) -> draw. Each filter
    sees the renormalized distribution its predecessor left; one token always stays; equal values keep the lower id.
    The draw is Gumbel-max: argmax over the kept tokens v of l_v / T + g_v, ties to the lower id, with
        h = fmix32(v * 0x9E3779B1 + key0);  h = fmix32(h ^ key1);  u = ((h >> 8) + 0.5) * 2^-24;  g = -ln(-ln u)
    all integers modulo 2^32, fmix32 the finalizer of MurmurHash3. A row of temperature 0 takes argmax l, lowest id.
    u has 25 significant bits: in float32 it would round to 1 and g to infinity (one row in 300 of a 50k vocabulary), so
    u is float64, or -ln u is taken as -log1p(-(1 - u)) where u >= 1/2, whose 1 - u is exact in float32.

    Args:
        logits_SV: float32; -inf marks a banned token; may be overwritten.
    Returns:
        token_ids_S: int64, on the same device, without a host synchronization.
    """

    def __call__(self, logits_SV: Tensor, sampling: SamplingTensors) -> Tensor: ...


class RopeAttentionFn(Protocol):
    """`RopeKVWriteFn`, then `PagedAttentionFn`, for a step whose requests have one query token each."""

    def __call__(
        self,
        qkv_TX: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor | None,
        q_norm_E: Tensor | None,
        k_norm_E: Tensor | None,
        norm_eps: float,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor: ...


@dataclass(frozen=True)
class LayerParts:
    """What is constant for a decoder layer: residual += attention(norm(residual)); residual += mlp(norm(residual)).

    Attributes:
        qkv, output, gate_up, down: linear layers of the same table; gate_up has gate first.
        norm_eps: of the two norms over the hidden size. head_norm_eps: of q_norm_E and k_norm_E.
    """

    attention_norm_D: Tensor
    mlp_norm_D: Tensor
    norm_eps: float
    qkv: LinearFn
    output: LinearFn
    cos_sin_PR: Tensor | None
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    head_norm_eps: float
    spec: AttentionSpec
    gate_up: LinearFn
    down: LinearFn
    activation: Activation


class LayerFn(Protocol):
    """A whole layer: residual is updated in place, K and V are written to the cache. For requests of any lengths."""

    def __call__(
        self, residual_TD: Tensor, positions_T: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> None: ...


@dataclass(frozen=True)
class FusedOps:
    """Ops fused with what comes before and after, where that saves launches and passes over small tensors.

    Optional: a model that finds none in its table, or has more rows, takes the single ops. Results may differ from
    theirs by the rounding of intermediates. Layers must come from the same table.

    Attributes:
        max_rows: largest T that the products serve; `rope_attention` serves any.
        norm_linear: (linear, x_TD, norm_D, eps) -> linear(rms_norm(x)).
        norm_gated_linear: (linear of 2 F outputs, x_TD, norm_D, eps, activation) -> gated_activation of that, (T, F).
        linear_add: (linear, x_TK, residual_TD): residual += linear(x), in place.
        layer: prepares a whole layer, which serves up to max_layer_rows; None where that is not worth it.
    """

    max_rows: int
    norm_linear: Callable[[LinearFn, Tensor, Tensor, float], Tensor]
    norm_gated_linear: Callable[[LinearFn, Tensor, Tensor, float, Activation], Tensor]
    linear_add: Callable[[LinearFn, Tensor, Tensor], None]
    rope_attention: RopeAttentionFn
    layer: Callable[[LayerParts], LayerFn] | None = None
    max_layer_rows: int = 0


class TensorParallel(Protocol):
    """What layers and sampler need of the ranks that share every layer of a model; all of them make the same calls."""

    @property
    def rank(self) -> int:
        """Place among these ranks."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def vocabulary(self, vocab_size: int) -> tuple[int, int]:
        """First token id of this rank's rows of embedding and head, and the one after the last."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors of one shape, on every rank; may be x itself, overwritten. On the CPU an
        element's bits do not depend on where in the tensor it lies."""
        ...

    def gather_columns(self, x_SV: Tensor, vocab_size: int) -> Tensor | None:
        """On rank 0 the ranks' columns side by side, (S, vocab_size); None on the others."""
        ...

    def gather_pairs(self, pairs_SC: Tensor) -> Tensor:
        """Every rank's small tensor, (size, S, C), on every rank."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor on every rank; the others' is overwritten and returned."""
        ...


@dataclass(frozen=True)
class DispatchedRows:
    """What `ExpertExchange.dispatch` brought here, and the way back of what the experts make of it.

    Attributes:
        x_MD: rows for the experts of this rank, in the order of its slots.
        offsets_X1: int32, first row of each slot, then M.
        combine: y_MD -> the weighted sums of this rank's own tokens, (T, D), as `WeightedSumFn` adds them. Called once,
            in the same order of layers on all ranks.
    """

    x_MD: Tensor
    offsets_X1: Tensor
    combine: Callable[[Tensor], Tensor]


class ExpertExchange(Protocol):
    """One layer's way between tokens and experts. Ranks with no token call it too, with T = 0."""

    @property
    def slots(self) -> Sequence[int]:
        """The experts whose weights this rank holds, by place; one may be held by several ranks."""
        ...

    def dispatch(self, hidden_TD: Tensor, expert_ids_TJ: Tensor, weights_TJ: Tensor) -> DispatchedRows:
        """Sends each token to the ranks of its experts."""
        ...


class ExpertParallel(Protocol):
    """What layers need of the ranks that share out the experts."""

    def exchange(self, layer: int, num_experts: int) -> ExpertExchange:
        """Of one layer, made at load."""
        ...


@dataclass(frozen=True)
class OpTable:
    """The ops of one backend.

    Attributes:
        name: what the log and `LeadReady.ops_backend` say.
        fused: None where the backend has none.
        is_capturable: what dense models call may be captured in a CUDA graph: no host wait, launches by shapes alone.
            `rope_kv_write` then writes no token of a negative slot, and attention gives zeros for a seq_len of 0.
        parallel: the ranks that hold the other parts of the layers; None when the rank holds whole layers.
        expert_parallel: the ranks that hold the other experts; None when the rank holds all.
    """

    name: str
    rms_norm: RmsNormFn
    add_rms_norm: AddRmsNormFn
    layer_norm: LayerNormFn
    rope_kv_write: RopeKVWriteFn
    paged_attention: PagedAttentionFn
    gated_activation: GatedActivationFn
    activation: ActivationFn
    linear: LinearFactory
    embedding: EmbeddingFactory
    sample: SampleFn
    route: RouteFn
    sort_by_expert: SortByExpertFn
    weighted_sum: WeightedSumFn
    experts: ExpertsFactory
    head_linear: HeadLinearFactory
    latent_write: LatentWriteFn
    latent_attention: LatentAttentionFn
    fused: FusedOps | None = None
    is_capturable: bool = False
    parallel: TensorParallel | None = None
    expert_parallel: ExpertParallel | None = None
