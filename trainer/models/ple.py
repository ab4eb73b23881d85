"""Several labels over experts of their own and shared ones, level by level."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlewheel.trainer.models.base import FeatureSpec, ModelInputs, Tower, Variable, biases, linear, side_by_side
from paddlewheel.trainer.models.config import PLEConfig
from paddlewheel.trainer.models.multitask import MultiTaskModel, mix_BH


class PLE(MultiTaskModel):
    """Progressive layered extraction (Tang et al., 2020, Progressive layered extraction); one level is its CGC."""

    def __init__(self, spec: FeatureSpec, config: PLEConfig) -> None:
        super().__init__(spec.num_labels, config.label_weights)
        self.levels = paddle.nn.LayerList(
            [
                _Level(
                    spec.flat_width if level == 0 else config.expert[-1],
                    spec.num_labels,
                    config,
                    last=level == config.levels - 1,
                )
                for level in range(config.levels)
            ]
        )
        self.towers = paddle.nn.LayerList(
            [
                Tower(config.expert[-1], config.tower, 1, dropout=config.dropout, norm=config.norm)
                for _ in range(spec.num_labels)
            ]
        )

    def forward(self, inputs: ModelInputs) -> Variable:
        states = [inputs.flat_BX] * (len(self.towers) + 1)
        for level in self.levels:
            states = level(states)
        return side_by_side([tower(state) for tower, state in zip(self.towers, states, strict=False)])

    def output_biases(self) -> Sequence[tuple[Variable, int]]:
        return biases(*self.towers)


class _Level(paddle.nn.Layer):  # type: ignore[misc]
    """Inputs and outputs: one state a label, then the shared one (which the last level leaves out)."""

    def __init__(self, num_inputs: int, num_labels: int, config: PLEConfig, *, last: bool) -> None:
        super().__init__()

        def experts(count: int) -> paddle.nn.LayerList:
            return paddle.nn.LayerList(
                [Tower(num_inputs, config.expert, None, dropout=config.dropout, norm=config.norm) for _ in range(count)]
            )

        self.label_experts = paddle.nn.LayerList([experts(config.label_experts) for _ in range(num_labels)])
        self.shared_experts = experts(config.shared_experts)
        num_own = config.label_experts + config.shared_experts
        self.gates = paddle.nn.LayerList([linear(num_inputs, num_own) for _ in range(num_labels)])
        num_all = num_labels * config.label_experts + config.shared_experts
        self.shared_gate = None if last else linear(num_inputs, num_all)

    def forward(self, states: list[Variable]) -> list[Variable]:
        *labels, common = states
        own = [[expert(x) for expert in experts] for experts, x in zip(self.label_experts, labels, strict=True)]
        shared = [expert(common) for expert in self.shared_experts]
        result = [mix_BH(gate(x), [*mine, *shared]) for gate, x, mine in zip(self.gates, labels, own, strict=True)]
        if self.shared_gate is not None:
            result.append(mix_BH(self.shared_gate(common), [*(e for mine in own for e in mine), *shared]))
        return result
