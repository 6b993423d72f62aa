"""One rank among those of its replica: its groups, its part of the model, and what all ranks have to agree on.

Owned by the loaded engine or follower, which closes it. Called by the loader.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sonar.config import ModelConfig, ParallelConfig
from sonar.distributed.expert_balance import ExpertBalance
from sonar.distributed.expert_exchange import ExpertRanks
from sonar.distributed.frames import FrameReader, FrameWriter, open_reader, open_writer
from sonar.distributed.groups import RankGroups
from sonar.distributed.rank_link import RankLink
from sonar.distributed.shard_map import make_shard_map
from sonar.distributed.stages import measure_stages, plan_stages
from sonar.distributed.step_link import ResultReceiver, ResultSender, StepReceiver, StepSender
from sonar.distributed.store import HeadStore
from sonar.errors import ConfigError
from sonar.models.base import WeightSource
from sonar.ops.table import OpTable
from sonar.transport import Address
from sonar.weights.sharded_weights import ShardedWeights
from sonar.worker.resolve import CacheNeeds, SettingRow

_STEPS, _RESULTS = "steps", "results/{group}"


class Ranks:
    """Owns this rank's process groups; the link is the process's own.

    Attributes:
        experts: how rows reach experts on other ranks; None when they are not shared out, or before `shard`.

    Raises:
        RemoteError: the ranks did not meet.
    """

    def __init__(self, link: RankLink, parallel: ParallelConfig, device: torch.device) -> None:
        self.parallel = parallel
        self.experts: ExpertRanks | None = None
        self._device = device
        self._spec = link.spec
        self._store = HeadStore(link)
        self._head = Address(link.spec.head_host, link.spec.head_port)
        self.groups = RankGroups(self._store, parallel, device, self._head)

    @property
    def is_lead(self) -> bool:
        """Whether this rank tells the others what to compute."""
        return self.parallel.rank == 0

    @property
    def drawing_ranks(self) -> tuple[int, ...]:
        """The rank of each data-parallel group whose results count: the first of its last stage."""
        parallel = self.parallel
        return tuple(range(parallel.world_size - parallel.stage_size, parallel.world_size, parallel.tp_size))

    def shard(
        self, weights: WeightSource, whole: ModelConfig, ops: OpTable
    ) -> tuple[WeightSource, ModelConfig, OpTable]:
        """This rank's weights, its part of the model's shape, and ops that know of the other ranks.

        Raises:
            ConfigError: more ranks than the model can be divided among.
        """
        parallel = self.parallel
        has_whole_experts = parallel.ep_size > 1
        shard = make_shard_map(whole, parallel.tp_size, parallel.tp_rank, has_whole_experts=has_whole_experts)
        stage = None
        if parallel.pp_size > 1:
            sizes = measure_stages(whole, weights.sizes())
            stage = plan_stages(whole, parallel, sizes.layers, sizes.first, sizes.last)[parallel.pp_rank]
        tensor = self.groups.tensor
        if tensor is not None:
            # Fused ops add a product to the residual before the ranks' products are summed.
            ops = replace(ops, parallel=tensor, fused=None)
        if self.groups.experts is not None:
            self.experts = ExpertRanks(
                self.groups.experts, tensor, ops.weighted_sum, self._device, parallel.redundant_experts
            )
            ops = replace(ops, expert_parallel=self.experts)
        return ShardedWeights(weights, shard), shard.local_config(stage), ops

    def agree(self, needs: CacheNeeds) -> CacheNeeds:
        """The tightest of all ranks' needs: what they lead to fits on every rank."""
        everyone = self.groups.gather_numbers([needs.budget, needs.token_bytes, *needs.num_layers])
        columns = list(zip(*everyone))
        return CacheNeeds(min(columns[0]), max(columns[1]), tuple(max(column) for column in columns[2:]))

    def balance(self) -> ExpertBalance | None:
        """Of the experts, once the model is loaded; None when they are not shared out.

        Raises:
            ConfigError: the model has no experts, or none that can move where they are asked to.
        """
        if self.experts is None:
            return None
        if not self.experts.layers:
            raise ConfigError(
                f"ep_size={self.parallel.ep_size} for a model without experts; leave it at 1", param="ep_size"
            )
        if self.parallel.rebalance_steps and not all(layer.tensors for layer in self.experts.layers.values()):
            raise ConfigError(
                f"rebalance_steps={self.parallel.rebalance_steps}: this model's experts are in a form that cannot "
                "move between ranks; leave it at 0",
                param="rebalance_steps",
            )
        return ExpertBalance(self.experts, self.parallel.rebalance_steps)

    def rows(self, local: ModelConfig) -> tuple[SettingRow, ...]:
        """Lines of the start-up table."""
        parallel, layers = self.parallel, local.layers
        return (
            SettingRow("tensor parallel", str(parallel.tp_size), f"this rank: {local.num_heads} heads, "
                       f"{local.num_kv_heads} KV heads, {local.intermediate_size} features"),
            *self._expert_rows(),
            SettingRow("pipeline", str(parallel.pp_size), f"this rank: layers {layers.start} to {layers.stop - 1}"),
        )  # fmt: skip

    def _expert_rows(self) -> tuple[SettingRow, ...]:
        if self.experts is None:
            return ()
        placement = next(iter(self.experts.layers.values())).placement
        what = f"this rank: {placement.slots_per_rank} places of a layer's {placement.num_experts} experts"
        groups = SettingRow("data parallel", str(self.parallel.num_groups), f"this rank: group {self.parallel.group}")
        return (groups, SettingRow("expert parallel", str(self.parallel.ep_size), what))

    def open_step_sender(self) -> StepSender:
        """On the lead."""
        return StepSender(self._open_writer(_STEPS, self.parallel.world_size - 1), self._spec.incarnation)

    def open_step_receiver(self) -> StepReceiver:
        """On every other rank."""
        reader = self._open_reader(_STEPS, self.parallel.rank - 1)
        return StepReceiver(reader, self._spec.incarnation, self.parallel.group)

    def open_result_sender(self) -> ResultSender | None:
        """On a rank whose results count, if that is not the lead; None elsewhere."""
        if self.is_lead or self.parallel.rank not in self.drawing_ranks:
            return None
        return ResultSender(self._open_writer(_RESULTS.format(group=self.parallel.group), 1))

    def open_result_receivers(self) -> tuple[ResultReceiver | None, ...]:
        """On the lead, one a data-parallel group; None for a group of which it draws itself."""
        return tuple(
            ResultReceiver(self._open_reader(_RESULTS.format(group=group), 0)) if rank else None
            for group, rank in enumerate(self.drawing_ranks)
        )

    def _open_writer(self, name: str, num_readers: int) -> FrameWriter:
        return open_writer(
            self._store,
            name,
            num_readers,
            is_one_host=self.groups.placement.is_one_host,
            own_host=self.groups.own_host,
            token=self._spec.token,
        )

    def _open_reader(self, name: str, reader: int) -> FrameReader:
        return open_reader(self._store, name, reader, self._spec.token)
