"""What goes wrong in a simulated cluster: hosts, networks, workers, engines and operators, at random moments.

Owns the agents, living and gone. Knows nothing of what the head should do about it: that is `cluster.sim.checks`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from random import Random

from cluster.config import DeploymentConfig
from cluster.control import ControlPlane
from cluster.events import DeploymentApplied, NodeDrainRequested
from cluster.messages import WorkerRef
from cluster.sim.agent import LoadTimes, SimAgent
from cluster.sim.link import SimLink

REBOOT_S = (5.0, 60.0)
CUT_S = (0.5, 10.0)
DRAINED_S = 30.0


class Churn:
    """Owner of the hosts.

    Args:
        num_devices, versions, load: of every host.

    Attributes:
        agents: node id -> the present start of its agent. faults: what was done so far.
    """

    def __init__(
        self,
        link: SimLink,
        control: ControlPlane,
        num_devices: int,
        versions: dict[str, str],
        load: LoadTimes,
        random: Random,
    ) -> None:
        self.agents: dict[str, SimAgent] = {}
        self.faults: Counter[str] = Counter()
        self._link = link
        self._control = control
        self._host = (num_devices, versions, load)
        self._random = random
        self._next_generation = 1
        self._is_on = False
        self._kinds: dict[str, Callable[[], bool]] = {
            "host lost": self._lose_host,
            "agent restarted": self._restart_agent,
            "network cut": self._cut,
            "worker crashed": self._crash_worker,
            "engine fault": self._fault,
            "link made anew": self._reconnect_lead,
            "node drained": self._drain,
            "scaled": self._scale,
        }

    def join(self, node_id: str) -> None:
        """A host's agent starts."""
        num_devices, versions, load = self._host
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        self.agents[node_id] = SimAgent(
            self._link, node_id, generation, num_devices, versions, load, Random(self._random.random())
        )

    def begin(self, faults_per_s: float) -> None:
        """Lets things go wrong until `stop`."""
        self._is_on = True
        self._plan_next(faults_per_s)

    def stop(self) -> None:
        """Nothing new goes wrong; what was begun (a reboot, a cut) takes its course."""
        self._is_on = False

    def _plan_next(self, faults_per_s: float) -> None:
        def strike() -> None:
            if self._is_on:
                kind = self._random.choice(list(self._kinds))
                if self._kinds[kind]():
                    self.faults[kind] += 1
                self._plan_next(faults_per_s)

        self._link.timeline.after(self._random.expovariate(faults_per_s), strike)

    def _any_agent(self) -> SimAgent | None:
        agent = self._random.choice(list(self.agents.values()))
        return agent if agent.is_alive else None

    def _any_worker(self) -> tuple[SimAgent, WorkerRef] | None:
        agent = self._any_agent()
        return (agent, self._random.choice(list(agent.workers))) if agent is not None and agent.workers else None

    def _lose_host(self) -> bool:
        agent = self._any_agent()
        if agent is None:
            return False
        agent.end()
        self._link.timeline.after(self._random.uniform(*REBOOT_S), lambda: self.join(agent.node_id))
        return True

    def _restart_agent(self) -> bool:
        agent = self._any_agent()
        if agent is None:
            return False
        agent.end()
        self.join(agent.node_id)
        return True

    def _cut(self) -> bool:
        agent = self._any_agent()
        if agent is None:
            return False
        agent.cut()
        self._link.timeline.after(self._random.uniform(*CUT_S), lambda: agent.connect() if agent.is_alive else None)
        return True

    def _crash_worker(self) -> bool:
        found = self._any_worker()
        if found is None:
            return False
        agent, ref = found
        agent.crash(ref)
        return True

    def _fault(self) -> bool:
        agent = self._any_agent()
        if agent is None or not agent.leads:
            return False
        self._random.choice(list(agent.leads.values())).fault()
        return True

    def _reconnect_lead(self) -> bool:
        agent = self._any_agent()
        if agent is None or not agent.leads:
            return False
        lead = self._random.choice(list(agent.leads.values()))
        lead.cut()
        self._link.timeline.after(0.2, lambda: lead.connect() if lead.is_alive else None)
        return True

    def _drain(self) -> bool:
        node_id = self._random.choice(list(self.agents))
        self._feed(NodeDrainRequested(node_id))
        self._link.timeline.after(DRAINED_S, lambda: self._feed(NodeDrainRequested(node_id, drain=False)))
        return True

    def _scale(self) -> bool:
        config = self._random.choice(list(self._control.state.deployments.values()))
        change = self._random.choice((-1, 1))
        if not 1 <= config.replicas + change <= 10_000:
            return False
        self._apply(dataclasses.replace(config, replicas=config.replicas + change))
        return True

    def _apply(self, config: DeploymentConfig) -> None:
        self._feed(DeploymentApplied(config))

    def _feed(self, event: DeploymentApplied | NodeDrainRequested) -> None:
        with self._link.meter.measure(type(event).__name__):
            self._control.feed(event)
