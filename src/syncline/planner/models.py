"""Describes models without their code: what each layer computes, keeps and sends for one sample.

Specs, as in the rest of the library:

```text
gpt(layers=32, hidden=4096)                   heads, sequence, vocabulary, attention="plain" | "flash"
bert(layers=24, hidden=1024)                  the same, with a bidirectional attention
mlp([784, 2048, 2048, 10])                    widths
vgg(16), resnet(50)                           11, 13, 16, 19; 50, 101, 152
cnn([("conv", 64, 3, 1), ("pool", 2), ("linear", 1000)], image=224)
```

A matrix product of (m × k) and (k × n) has 2mkn FLOPs. The backward has twice the forward's work: gradients of the
inputs and of the weights. A transformer layer has 24·s·h² + 4·s²·h FLOPs for one sample (plain attention computes the
masked half too).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from syncline.errors import SpecError
from syncline.planner.devices import ITEM_BYTES, Device, Precision
from syncline.specs import Registry

__all__ = ["LayerWork", "ModelWork", "TransformerShape", "build_model", "model_names"]

Attention = Literal["plain", "flash"]
PRODUCTS_OF_BLOCK = 6
"""Matrix products of a transformer layer: query, key and value in one; scores; values; projection; two of the MLP."""
KERNELS_OF_BLOCK = 24
"""Kernels of a transformer layer's forward."""
BACKWARD_WORK = 2
"""The backward's work in multiples of the forward's."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """What one layer does for one sample. `copies` equal layers may follow each other."""

    name: str
    flops: float
    """FLOPs of the matrix products of the forward."""
    products: int
    """Matrix products of the forward."""
    streamed_elements: float
    """Elements that kernels without matrix products read and write in the forward. Tensor teams divide them."""
    replicated_elements: float = 0.0
    """The same for what every rank of a tensor team computes."""
    kernels: int = 2
    parameters: int = 0
    tied_parameters: int = 0
    """Parameters of the first layer that this layer uses too. On another pipeline stage it has a copy of them."""
    largest_tensor: int = 0
    """Elements of its largest parameter tensor. 0: not known."""
    output_elements: float = 0.0
    saved_elements: float = 0.0
    """Elements that the forward keeps for the backward."""
    copies: int = 1
    tensor: bool = False
    """Whether a tensor team divides the layer."""
    recomputed: bool = True
    """Whether recomputation applies to it."""

    def forward_s(self, samples: float, team: int, device: Device, precision: Precision) -> float:
        """Seconds of one forward of one copy, by the formula in devices.py."""
        return self._seconds(samples, team, device, precision, 1)

    def backward_s(self, samples: float, team: int, device: Device, precision: Precision) -> float:
        """Seconds of one backward of one copy."""
        return self._seconds(samples, team, device, precision, BACKWARD_WORK)

    def matrix_share(self, samples: float, team: int, device: Device, precision: Precision) -> float:
        """The share of the device's peak that the matrix products of this layer reach."""
        divided = team if self.tensor else 1
        flops = self.flops * samples / divided
        seconds = device.matrix_s(
            flops, products=self.products, weight_bytes=self._weight_bytes(divided, precision), precision=precision
        )
        return flops / seconds / device.peak(precision) if seconds else 1.0

    def _weight_bytes(self, divided: int, precision: Precision) -> float:
        return self.parameters * ITEM_BYTES[precision] / divided

    def _seconds(self, samples: float, team: int, device: Device, precision: Precision, passes: int) -> float:
        divided = team if self.tensor else 1
        matrix = device.matrix_s(
            passes * self.flops * samples / divided,
            products=passes * self.products,
            weight_bytes=passes * self._weight_bytes(divided, precision),
            precision=precision,
        )
        elements = samples * (self.streamed_elements / divided + self.replicated_elements)
        stream = device.stream_s(passes * elements * ITEM_BYTES[precision])
        return max(matrix + stream, passes * self.kernels * device.launch_s)


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a transformer, for formulas of its activations."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    attention: Attention = "plain"


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """A model as a chain of layers.

    >>> model = build_model("gpt(layers=2, hidden=64, heads=4, sequence=16, vocabulary=100)")
    >>> [(layer.name, layer.copies) for layer in model.layers], model.parameters
    ([('embedding', 1), ('block', 2), ('head', 1)], 107520)
    """

    text: str
    layers: tuple[LayerWork, ...]
    unit: str = "samples"
    sample_bytes: float = 0.0
    """Bytes of one sample in storage."""
    precision: Precision = "half"
    transformer: TransformerShape | None = None

    @cached_property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(layer.parameters * layer.copies for layer in self.layers)

    @cached_property
    def flops(self) -> float:
        """FLOPs of the forward of one sample."""
        return sum(layer.flops * layer.copies for layer in self.layers)

    @cached_property
    def cuts(self) -> int:
        """The most stages of a pipeline: its repeated blocks, or else its layers."""
        blocks = [layer.copies for layer in self.layers if layer.copies > 1]
        return max(blocks) if blocks else len(self.layers)

    @property
    def tensor_limit(self) -> int:
        """The largest tensor team: one attention head a rank."""
        return self.transformer.heads if self.transformer is not None else 1

    def at_precision(self, precision: Precision) -> ModelWork:
        """The same model in another precision."""
        return replace(self, precision=precision)


def build_model(text: str) -> ModelWork:
    """The model that a spec describes.

    >>> round(build_model("resnet(50)").parameters / 1e6, 1), round(build_model("vgg(16)").flops / 1e9, 1)
    (25.6, 30.9)
    >>> build_model("gpt(layers=32)")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: model 'gpt(layers=32)': missing a required argument: 'hidden'; write gpt(layers, \
hidden, heads=None, sequence=2048, vocabulary=51200, attention='plain')

    Raises:
        SpecError: if there is no such model, or its numbers are impossible.
    """
    return replace(_REGISTRY.build(text), text=text)


def model_names() -> list[str]:
    """The names of all families."""
    return _REGISTRY.names()


def _gpt(
    layers: int,
    hidden: int,
    heads: int | None = None,
    sequence: int = 2048,
    vocabulary: int = 51200,
    attention: Attention = "plain",
) -> ModelWork:
    """A decoder of GPT's shape, whose output layer uses the weights of the embedding."""
    return _transformer("gpt", layers, hidden, heads, sequence, vocabulary, attention)


def _bert(
    layers: int,
    hidden: int,
    heads: int | None = None,
    sequence: int = 512,
    vocabulary: int = 30528,
    attention: Attention = "plain",
) -> ModelWork:
    """An encoder of BERT's shape."""
    return _transformer("bert", layers, hidden, heads, sequence, vocabulary, attention)


def _transformer(
    name: str, layers: int, hidden: int, heads: int | None, sequence: int, vocabulary: int, attention: Attention
) -> ModelWork:
    heads = max(1, hidden // 128) if heads is None else heads
    shape = TransformerShape(layers, hidden, heads, sequence, vocabulary, attention)
    _check_transformer(name, shape)
    s, h = sequence, hidden
    # Korthikanti's activations, in elements of 2 bytes, written once and read once.
    scores = 5 * heads * s * s if attention == "plain" else 0
    block = LayerWork(
        name="block",
        flops=24.0 * s * h * h + 4.0 * s * s * h,
        products=PRODUCTS_OF_BLOCK,
        streamed_elements=24.0 * s * h + scores,
        replicated_elements=10.0 * s * h,
        kernels=KERNELS_OF_BLOCK,
        parameters=12 * h * h + 13 * h,
        largest_tensor=4 * h * h,
        output_elements=float(s * h),
        saved_elements=17.0 * s * h + scores / 2,
        copies=layers,
        tensor=True,
    )
    embedding = LayerWork(
        name="embedding",
        flops=0.0,
        products=0,
        streamed_elements=0.0,
        replicated_elements=4.0 * s * h,
        kernels=4,
        parameters=(vocabulary + s) * h,
        largest_tensor=vocabulary * h,
        output_elements=float(s * h),
        saved_elements=s * h / 2,
        tensor=True,
        recomputed=False,
    )
    head = LayerWork(
        name="head",
        flops=2.0 * s * h * vocabulary,
        products=1,
        streamed_elements=4.0 * s * vocabulary,
        replicated_elements=4.0 * s * h,
        kernels=8,
        parameters=2 * h,
        tied_parameters=vocabulary * h,
        output_elements=float(s * vocabulary),
        saved_elements=2.0 * s * h + 2.0 * s * vocabulary,
        tensor=True,
        recomputed=False,
    )
    return ModelWork(
        text="",
        layers=(embedding, block, head),
        unit="sequences",
        sample_bytes=4.0 * s,
        transformer=shape,
    )


def _check_transformer(name: str, shape: TransformerShape) -> None:
    for key in ("layers", "hidden", "heads", "sequence", "vocabulary"):
        _check_whole(f"{name}: {key}", getattr(shape, key))
    if shape.hidden % shape.heads:
        raise SpecError(f"{name}: hidden is {shape.hidden}, which {shape.heads} heads do not divide")
    if shape.attention not in ("plain", "flash"):
        raise SpecError(f"{name}: attention is {shape.attention!r}; it must be 'plain' or 'flash'")


def _mlp(widths: Sequence[int]) -> ModelWork:
    """Linear layers with activations between them."""
    if not isinstance(widths, (list, tuple)) or len(widths) < 2:
        raise SpecError(f"mlp: widths are {widths!r}; write at least two: mlp([784, 2048, 10])")
    for width in widths:
        _check_whole("mlp: a width", width)
    layers = tuple(_linear(f"linear{place}", a, b) for place, (a, b) in enumerate(itertools.pairwise(widths)))
    return ModelWork(text="", layers=layers, sample_bytes=4.0 * widths[0], precision="single")


def _linear(name: str, inputs: int, outputs: int) -> LayerWork:
    return LayerWork(
        name=name,
        flops=2.0 * inputs * outputs,
        products=1,
        streamed_elements=2.0 * outputs,
        kernels=2,
        parameters=inputs * outputs + outputs,
        largest_tensor=inputs * outputs,
        output_elements=float(outputs),
        saved_elements=float(inputs + outputs),
    )


@dataclass
class _Convolutions:
    """Collects the layers of a convolutional network and keeps the shape of the image."""

    channels: int
    size: int
    norm: bool = True

    def conv(
        self, name: str, outputs: int, kernel: int | tuple[int, int], stride: int = 1, *, pad: bool = True
    ) -> LayerWork:
        """A convolution with batch norm and an activation."""
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.size = -(-self.size // stride) if pad else (self.size - height) // stride + 1
        if self.size < 1:
            raise SpecError(f"cnn: the image is smaller than the kernel {kernel} of {name}")
        inner, self.channels = self.channels * height * width, outputs
        places = self.size * self.size
        out = float(places * outputs)
        return LayerWork(
            name=name,
            flops=2.0 * inner * outputs * places,
            products=1,
            streamed_elements=out * (6 if self.norm else 3),
            kernels=4 if self.norm else 2,
            parameters=inner * outputs + (2 if self.norm else 1) * outputs,
            largest_tensor=inner * outputs,
            output_elements=out,
            saved_elements=out * (3 if self.norm else 2),
        )

    def pool(self, name: str, kernel: int, stride: int | None = None) -> LayerWork:
        self.size = max(1, -(-self.size // (stride or kernel)))
        out = float(self.size * self.size * self.channels)
        return LayerWork(
            name=name,
            flops=0.0,
            products=0,
            streamed_elements=out * (kernel * kernel + 1),
            kernels=1,
            output_elements=out,
            saved_elements=out,
        )


def _merged(name: str, layers: Sequence[LayerWork]) -> LayerWork:
    """One layer that does the work of several: a block that is not cut."""
    return LayerWork(
        name=name,
        flops=sum(each.flops for each in layers),
        products=sum(each.products for each in layers),
        streamed_elements=sum(each.streamed_elements for each in layers),
        kernels=sum(each.kernels for each in layers),
        parameters=sum(each.parameters for each in layers),
        largest_tensor=max(each.largest_tensor for each in layers),
        output_elements=layers[-1].output_elements,
        saved_elements=sum(each.saved_elements for each in layers),
    )


VGG = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
RESNET = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
IMAGE_BYTES = 110e3
"""Bytes of an average image of ImageNet in storage."""


def _vgg(depth: int = 16, classes: int = 1000) -> ModelWork:
    """VGG without batch norm: K. Simonyan and A. Zisserman, 2015."""
    if depth not in VGG:
        raise SpecError(f"vgg: depth is {depth!r}; it must be one of {', '.join(map(str, VGG))}")
    image = _Convolutions(3, 224, norm=False)
    layers = []
    for part, (count, outputs) in enumerate(zip(VGG[depth], (64, 128, 256, 512, 512), strict=True), start=1):
        layers += [image.conv(f"conv{part}.{number}", outputs, 3) for number in range(1, count + 1)]
        layers.append(image.pool(f"pool{part}", 2))
    widths = (512 * 7 * 7, 4096, 4096, classes)
    layers += [_linear(f"fc{n}", a, b) for n, (a, b) in enumerate(itertools.pairwise(widths), start=6)]
    return ModelWork(text="", layers=tuple(layers), unit="images", sample_bytes=IMAGE_BYTES, precision="single")


def _resnet(depth: int = 50, classes: int = 1000) -> ModelWork:
    """ResNet with bottleneck blocks: K. He and others, 2016."""
    if depth not in RESNET:
        raise SpecError(f"resnet: depth is {depth!r}; it must be one of {', '.join(map(str, RESNET))}")
    image = _Convolutions(3, 224)
    layers = [image.conv("conv1", 64, 7, 2), image.pool("pool1", 3, 2)]
    for part, (count, width) in enumerate(zip(RESNET[depth], (64, 128, 256, 512), strict=True), start=1):
        for number in range(count):
            stride = 2 if part > 1 and number == 0 else 1
            work = []
            if number == 0:
                side = _Convolutions(image.channels, image.size)
                work.append(side.conv("shortcut", 4 * width, 1, stride))
            work += [image.conv("1", width, 1), image.conv("2", width, 3, stride), image.conv("3", 4 * width, 1)]
            layers.append(_merged(f"layer{part}.{number}", work))
    layers += [image.pool("pool2", image.size), _linear("fc", 2048, classes)]
    return ModelWork(text="", layers=tuple(layers), unit="images", sample_bytes=IMAGE_BYTES, precision="single")


CNN_FORM = 'cnn([("conv", 64, 3, 1), ("pool", 2), ("linear", 1000)], image=224, channels=3)'


def _cnn(layers: Sequence[Any], image: int = 224, channels: int = 3) -> ModelWork:
    """A chain of ("conv", outputs, kernel, stride), ("pool", kernel) and ("linear", outputs)."""
    _check_whole("cnn: image", image)
    _check_whole("cnn: channels", channels)
    if not isinstance(layers, (list, tuple)) or not layers:
        raise SpecError(f"cnn: layers are {layers!r}; write {CNN_FORM}")
    shape, work, flat = _Convolutions(channels, image), [], 0
    for place, layer in enumerate(layers):
        match layer:
            case ("conv", int(outputs), int(kernel), *more) if not flat and len(more) < 2 and outputs > 0 < kernel:
                work.append(shape.conv(f"conv{place}", outputs, kernel, *more))
            case ("pool", int(kernel)) if not flat and kernel > 0:
                work.append(shape.pool(f"pool{place}", kernel))
            case ("linear", int(outputs)) if outputs > 0:
                work.append(_linear(f"linear{place}", flat or shape.channels * shape.size**2, outputs))
                flat = outputs
            case _:
                raise SpecError(f"cnn: layer {place} is {layer!r}; write {CNN_FORM}, with linear layers last")
    sample = 4.0 * channels * image * image
    return ModelWork(text="", layers=tuple(work), unit="images", sample_bytes=sample, precision="single")


def _inception() -> ModelWork:
    """Inception-v3: C. Szegedy and others, 2016. Images of 299 × 299, without the auxiliary classifier."""
    image = _Convolutions(3, 299)
    layers = [
        image.conv("conv1", 32, 3, 2, pad=False),
        image.conv("conv2", 32, 3, pad=False),
        image.conv("conv3", 64, 3),
        image.pool("pool1", 3, 2),
        image.conv("conv4", 80, 1),
        image.conv("conv5", 192, 3, pad=False),
    ]
    size, channels = 35, 192
    tall, wide = (7, 1), (1, 7)
    branches: list[tuple[str, int, int, Any]] = [
        *(("a", 35, out, [[(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], [(pool, 1)]])
          for pool, out in ((32, 256), (64, 288), (64, 288))),
        ("b", 17, 768, [[(384, 3)], [(64, 1), (96, 3), (96, 3)]]),
        *(("c", 17, 768, [[(192, 1)], [(n, 1), (n, wide), (192, tall)],
                          [(n, 1), (n, tall), (n, wide), (n, tall), (192, wide)], [(192, 1)]])
          for n in (128, 160, 160, 192)),
        ("d", 8, 1280, [[(192, 1), (320, 3)], [(192, 1), (192, wide), (192, tall), (192, 3)]]),
        *(("e", 8, 2048, [[(320, 1)], [(384, 1), (384, (1, 3))], [(384, (3, 1))],
                          [(448, 1), (384, 3), (384, (1, 3))], [(384, (3, 1))], [(192, 1)]])
          for _ in range(2)),
    ]  # fmt: skip
    for place, (kind, out_size, outputs, parts) in enumerate(branches):
        work = []
        for part in parts:
            inner = 384 if kind == "e" and part == [(384, (3, 1))] else channels
            branch = _Convolutions(inner, out_size if kind in "bd" and len(part) == 1 else size)
            for number, (width, kernel) in enumerate(part):
                if kind in "bd" and number == len(part) - 1:
                    branch.size = out_size
                work.append(branch.conv(str(number), width, kernel))
        layers.append(replace(_merged(f"{kind}{place}", work), output_elements=float(outputs * out_size**2)))
        size, channels = out_size, outputs
    layers.append(_linear("fc", 2048, 1000))
    return ModelWork(text="", layers=tuple(layers), unit="images", sample_bytes=IMAGE_BYTES, precision="single")


def _check_whole(what: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= 10**7:
        raise SpecError(f"{what} is {value!r}; it must be a whole number between 1 and 10000000")


_REGISTRY = Registry[ModelWork](
    "model",
    {
        **dict.fromkeys(("gpt2", "gpt3", "transformer", "decoder", "llama", "megatron"), "gpt"),
        **dict.fromkeys(("encoder", "bertlarge"), "bert"),
        **dict.fromkeys(("resnet50", "resnet101", "resnet152"), "resnet(50)"),
        **dict.fromkeys(("vgg16", "vgg19"), "vgg(16)"),
        **dict.fromkeys(("inceptionv3", "googlenet"), "inception"),
        "linear": "mlp",
    },
)
for _name, _builder in (
    ("gpt", _gpt),
    ("bert", _bert),
    ("mlp", _mlp),
    ("vgg", _vgg),
    ("resnet", _resnet),
    ("cnn", _cnn),
    ("inception", _inception),
):
    _REGISTRY.add(_name, _builder)
