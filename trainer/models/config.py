"""The job's `model` block: one typed class a kind. Importable without Paddle.

A class here says what a kind may be told; the model itself, its paper and its formulas are in the file that
`implementation` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter

Units = tuple[Annotated[int, Field(ge=1)], ...]


class ModelError(ValueError):
    """The job's features do not fit its model, or the user's own model cannot be had or built."""


class ModelConfig(BaseModel):
    """What all kinds share."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    implementation: ClassVar[str]
    """`module:Class` of the model."""

    kind: str
    """Model by name."""


class _Tower(ModelConfig):
    """What every model with fully connected layers may be told about them."""

    tower: Units = (400, 400, 400)
    """Units of each hidden layer of the tower."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of hidden activations set to zero in training."""

    norm: Literal["none", "layer"] = "none"
    """`layer`: layer normalisation (Ba et al., 2016) before the ReLU of each hidden layer."""


class LRConfig(ModelConfig):
    """Logistic regression."""

    implementation = "paddlewheel.trainer.models.lr:LogisticRegression"

    kind: Literal["lr"] = "lr"
    """Model by name."""


class FMConfig(ModelConfig):
    """Factorization machine."""

    implementation = "paddlewheel.trainer.models.fm:FactorizationMachine"

    kind: Literal["fm"] = "fm"
    """Model by name."""


class FwFMConfig(ModelConfig):
    """Field-weighted factorization machine."""

    implementation = "paddlewheel.trainer.models.fwfm:FieldWeightedFM"

    kind: Literal["fwfm"] = "fwfm"
    """Model by name."""


class WideDeepConfig(_Tower):
    """Wide & Deep."""

    implementation = "paddlewheel.trainer.models.wide_deep:WideDeep"

    kind: Literal["wide_deep"] = "wide_deep"
    """Model by name."""


class DeepFMConfig(_Tower):
    """DeepFM."""

    implementation = "paddlewheel.trainer.models.deepfm:DeepFM"

    kind: Literal["deepfm"] = "deepfm"
    """Model by name."""


class DCNConfig(_Tower):
    """DCN-v2."""

    implementation = "paddlewheel.trainer.models.dcn:DCNv2"

    kind: Literal["dcn"] = "dcn"
    """Model by name."""

    cross_layers: int = Field(default=3, ge=1)
    """Layers of the cross network; each raises the degree of the interactions by one."""

    rank: int | None = Field(default=None, ge=1)
    """Cross weights as a product of two matrices of this rank. None: full matrices."""

    structure: Literal["stacked", "parallel"] = "parallel"
    """`stacked`: the tower reads the cross network's output. `parallel`: both read the inputs."""


class DLRMConfig(_Tower):
    """DLRM."""

    implementation = "paddlewheel.trainer.models.dlrm:DLRM"

    kind: Literal["dlrm"] = "dlrm"
    """Model by name."""

    bottom: Units = (64,)
    """Hidden layers that the dense columns go through; a layer of the tables' width follows by itself."""


class XDeepFMConfig(_Tower):
    """xDeepFM."""

    implementation = "paddlewheel.trainer.models.xdeepfm:XDeepFM"

    kind: Literal["xdeepfm"] = "xdeepfm"
    """Model by name."""

    cin: Units = Field(default=(64, 64), min_length=1)
    """Feature maps of each layer of the compressed interaction network."""


class AutoIntConfig(_Tower):
    """AutoInt; with a non-empty tower AutoInt+."""

    implementation = "paddlewheel.trainer.models.autoint:AutoInt"

    kind: Literal["autoint"] = "autoint"
    """Model by name."""

    tower: Units = ()
    """Units of each hidden layer of a tower beside the attention. Empty: no tower."""

    attention_layers: int = Field(default=3, ge=1)
    """Layers of self-attention over the features."""

    heads: int = Field(default=2, ge=1)
    """Attention heads of each layer."""

    head_width: int = Field(default=16, ge=1)
    """Floats of each head's keys, queries and values."""


class FinalMLPConfig(_Tower):
    """FinalMLP: two towers whose outputs meet in a bilinear form."""

    implementation = "paddlewheel.trainer.models.finalmlp:FinalMLP"

    kind: Literal["finalmlp"] = "finalmlp"
    """Model by name."""

    tower: Units = Field(default=(400, 400), min_length=1)
    """Units of each layer of the first stream."""

    second_tower: Units = Field(default=(400,), min_length=1)
    """Units of each layer of the second stream."""

    heads: int = Field(default=1, ge=1)
    """Blocks of the bilinear fusion. Must divide the last layer of both streams."""

    gate: Units | None = None
    """Hidden layers of the gates that choose each stream's inputs (`[]`: none of them). None: no gates."""

    gate_context: tuple[str, ...] = ()
    """Features that steer the first stream's gate. Empty: a learnt vector."""

    second_gate_context: tuple[str, ...] = ()
    """Features that steer the second stream's gate. Empty: a learnt vector."""


class _Sequences(_Tower):
    targets: dict[str, str] = Field(default_factory=dict)
    """Sequence feature -> the single-valued feature that it is compared with. Not given: the one of its table."""

    attention: Units = (80, 40)
    """Hidden layers of the attention unit."""


class DINConfig(_Sequences):
    """Deep interest network."""

    implementation = "paddlewheel.trainer.models.din:DIN"

    kind: Literal["din"] = "din"
    """Model by name."""

    softmax: bool = False
    """Normalise the attention over the sequence. The paper does not, so that its sum tells the strength of interest."""


class DIENConfig(_Sequences):
    """Deep interest evolution network, with attention on the input of the second GRU (AIGRU)."""

    implementation = "paddlewheel.trainer.models.dien:DIEN"

    kind: Literal["dien"] = "dien"
    """Model by name."""

    auxiliary_weight: float = Field(default=0.0, ge=0)
    """Weight of the auxiliary loss: each state tells the next id from that of another row of the batch."""


class TwoTowerConfig(_Tower):
    """Two towers whose outputs meet in a dot product, for retrieval."""

    implementation = "paddlewheel.trainer.models.two_tower:TwoTower"

    kind: Literal["two_tower"] = "two_tower"
    """Model by name."""

    tower: Units = (128, 64)
    """Units of each hidden layer of both towers."""

    item: tuple[str, ...] = Field(min_length=1)
    """Features of the item; the first is its identity, single-valued. All others and dense columns are the user's."""

    width: int = Field(default=32, ge=1)
    """Floats of a tower's output, normalised to length 1."""

    temperature: float = Field(default=0.1, gt=0)
    """Scores are the cosine divided by this."""

    loss: Literal["in_batch_softmax", "pointwise"] = "in_batch_softmax"
    """`in_batch_softmax`: each positive row's item against all items of the batch. `pointwise`: logistic loss."""


class _MultiTask(ModelConfig):
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of hidden activations set to zero in training."""

    norm: Literal["none", "layer"] = "none"
    """`layer`: layer normalisation (Ba et al., 2016) before the ReLU of each hidden layer."""

    label_weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Weight of each label's loss, in the order of `data.labels`. Empty: 1 for each."""


class SharedBottomConfig(_MultiTask):
    """Several labels: one shared network, then a tower a label."""

    implementation = "paddlewheel.trainer.models.shared_bottom:SharedBottom"

    kind: Literal["shared_bottom"] = "shared_bottom"
    """Model by name."""

    bottom: Units = Field(default=(256,), min_length=1)
    """Units of each layer of the shared network."""

    tower: Units = (64,)
    """Units of each hidden layer of each label's tower."""


class MMoEConfig(_MultiTask):
    """Several labels: multi-gate mixture of experts."""

    implementation = "paddlewheel.trainer.models.mmoe:MMoE"

    kind: Literal["mmoe"] = "mmoe"
    """Model by name."""

    experts: int = Field(default=4, ge=1)
    """Experts that all labels share."""

    expert: Units = Field(default=(128,), min_length=1)
    """Units of each layer of an expert."""

    tower: Units = (64,)
    """Units of each hidden layer of each label's tower."""


class PLEConfig(_MultiTask):
    """Several labels: progressive layered extraction."""

    implementation = "paddlewheel.trainer.models.ple:PLE"

    kind: Literal["ple"] = "ple"
    """Model by name."""

    levels: int = Field(default=2, ge=1)
    """Extraction levels. With 1 this is CGC."""

    shared_experts: int = Field(default=2, ge=1)
    """Experts of each level that all labels share."""

    label_experts: int = Field(default=2, ge=1)
    """Experts of each level that one label owns."""

    expert: Units = Field(default=(128,), min_length=1)
    """Units of each layer of an expert."""

    tower: Units = (64,)
    """Units of each hidden layer of each label's tower."""


class ESMMConfig(_MultiTask):
    """Labels [click, conversion]: conversion is trained over all rows as P(click) * P(conversion | click)."""

    implementation = "paddlewheel.trainer.models.esmm:ESMM"

    kind: Literal["esmm"] = "esmm"
    """Model by name."""

    tower: Units = (128, 64)
    """Units of each hidden layer of both towers."""


class CustomModelConfig(ModelConfig):
    """A model from the user's own module."""

    kind: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:Class`; the class is a `trainer.models.base.Model`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """What the class is told: its `Options`, a pydantic model, checks them."""

    folder: str | None = None
    """Folder in which the module is looked for, before PYTHONPATH and what is installed. None: the job file's."""

    sha256: str | None = Field(default=None, pattern=r"^([0-9a-f]{64}|any)$")
    """Of the module's file; another file is refused. None: as the file is when the job is read. `any`: nothing is
    compared."""

    @property
    def implementation(self) -> str:  # type: ignore[override]
        """Where the class is."""
        return self.kind


DEFAULT_KIND = "deepfm"


def kind(value: Any) -> str:
    """Which member of the union a `model` block is for."""
    given = value.get("kind", DEFAULT_KIND) if isinstance(value, Mapping) else getattr(value, "kind", None)
    return CustomModelConfig.__name__ if isinstance(given, str) and ":" in given else str(given)


AnyModelConfig = Annotated[
    Annotated[LRConfig, Tag("lr")]
    | Annotated[FMConfig, Tag("fm")]
    | Annotated[FwFMConfig, Tag("fwfm")]
    | Annotated[WideDeepConfig, Tag("wide_deep")]
    | Annotated[DeepFMConfig, Tag("deepfm")]
    | Annotated[DCNConfig, Tag("dcn")]
    | Annotated[DLRMConfig, Tag("dlrm")]
    | Annotated[XDeepFMConfig, Tag("xdeepfm")]
    | Annotated[AutoIntConfig, Tag("autoint")]
    | Annotated[FinalMLPConfig, Tag("finalmlp")]
    | Annotated[DINConfig, Tag("din")]
    | Annotated[DIENConfig, Tag("dien")]
    | Annotated[TwoTowerConfig, Tag("two_tower")]
    | Annotated[SharedBottomConfig, Tag("shared_bottom")]
    | Annotated[MMoEConfig, Tag("mmoe")]
    | Annotated[PLEConfig, Tag("ple")]
    | Annotated[ESMMConfig, Tag("esmm")]
    | Annotated[CustomModelConfig, Tag("CustomModelConfig")],
    Discriminator(kind),
]
"""The `model` block of a job: the kind decides which keys it may have."""

KINDS: dict[str, type[ModelConfig]] = {
    get_args(member)[1].tag: get_args(member)[0]
    for member in get_args(get_args(AnyModelConfig)[0])
    if get_args(member)[0] is not CustomModelConfig
}
"""The built-in kinds by the name that a job gives them."""

_ADAPTER: TypeAdapter[ModelConfig] = TypeAdapter(AnyModelConfig)


def parse_model(block: Mapping[str, Any]) -> ModelConfig:
    """A `model` block from plain data, `deepfm` when it names no kind.

    Raises:
        pydantic.ValidationError: unknown kind, or a key that this kind does not have.
    """
    return _ADAPTER.validate_python(block)
