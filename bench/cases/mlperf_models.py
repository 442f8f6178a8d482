"""The workloads of MLPerf Training v1.1, small: what their steps ask, and not how large they are.

Language, images, detection and segmentation are models of transformers; recommendation, speech, volumes, boxes and Go
are small modules as the reference implementations have them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Mapping[str, Any]


class Recommender(nn.Module):
    """DLRM: bags of indices with offsets, and the products of all pairs of embeddings."""

    def __init__(self, tables: int = 8, rows: int = 5000, width: int = 32) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.below = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(nn.Linear(pairs + width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        x = self.below(dense)
        rows = [x, *(bag(index, offset) for bag, index, offset in zip(self.bags, indices, offsets, strict=True))]
        stacked = torch.stack(rows, 1)
        left, right = torch.tril_indices(len(rows), len(rows), -1, device=x.device)
        pairs = torch.bmm(stacked, stacked.mT)[:, left, right]
        logits = self.above(torch.cat([x, pairs], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels)


def recommendations(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    examples, tables, each = 256, 8, 4
    cuts = torch.randint(0, examples * each, (tables, examples - 1), generator=generator).sort(1).values
    return {
        "dense": torch.randn(examples, 13, generator=generator),
        "indices": torch.randint(0, 5000, (tables, examples * each), generator=generator),
        "offsets": torch.cat([torch.zeros(tables, 1, dtype=torch.int64), cuts], 1),
        "labels": torch.randint(0, 2, (examples,), generator=generator).float(),
    }


class Transducer(nn.Module):
    """RNN-T: an LSTM over packed frames, one over the words so far, and their joint; the loss sums over alignments."""

    def __init__(self, features: int = 24, width: int = 48, words: int = 29) -> None:
        super().__init__()
        self.encoder = nn.LSTM(features, width, 2, batch_first=True)
        self.embedding = nn.Embedding(words, width)
        self.predictor = nn.LSTM(width, width, batch_first=True)
        self.joint = nn.Sequential(nn.ReLU(), nn.Linear(width, words))

    def forward(self, frames: Tensor, frame_lengths: Tensor, words: Tensor, word_lengths: Tensor) -> Tensor:
        frames, words = frames[:, : frame_lengths.max().item()], words[:, : word_lengths.max().item()]
        heard, _ = self.encoder(frames)
        said, _ = self.predictor(self.embedding(F.pad(words, (1, 0))))
        scores = self.joint(heard[:, :, None] + said[:, None]).log_softmax(-1)
        return alignments(scores, words, frame_lengths, word_lengths).mean()


def alignments(scores: Tensor, words: Tensor, frame_lengths: Tensor, word_lengths: Tensor) -> Tensor:
    """The negative log-likelihood of each example, [B]. scores: [B, T, U + 1, V], where 0 stands for no word."""
    batch, _, more, _ = scores.shape
    nothing = scores[..., 0]
    word = scores[:, :, :-1].gather(-1, words[:, None, :, None].expand(-1, scores.shape[1], -1, 1)).squeeze(-1)
    # The probabilities of a time step are those of the one before, and then the running sum over its words.
    before = F.pad(word.cumsum(-1), (1, 0))
    rows = [before[:, 0]]
    for time in range(1, scores.shape[1]):
        stayed = rows[-1] + nothing[:, time - 1]
        rows.append((stayed - before[:, time]).logcumsumexp(-1) + before[:, time])
    reached = torch.stack(rows, 1) + nothing
    last = (frame_lengths - 1) * more + word_lengths
    return -reached.reshape(batch, -1).gather(1, last[:, None]).squeeze(1)


def utterances(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    frames, words = torch.randint(10, 17, (8,), generator=generator), torch.randint(3, 7, (8,), generator=generator)
    frames[0], words[0] = 16, 6
    return {
        "frames": torch.randn(8, 16, 24, generator=generator),
        "frame_lengths": frames,
        "words": torch.randint(1, 29, (8, 6), generator=generator),
        "word_lengths": words,
    }


class Volumes(nn.Module):
    """3D U-Net: two levels, instance norms, and the sum of the Dice loss and the cross-entropy."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()

        def block(into: int, out: int) -> nn.Module:
            layers = [nn.Conv3d(into, out, 3, padding=1, bias=False), nn.InstanceNorm3d(out, affine=True), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv3d(out, out, 3, padding=1), nn.ReLU())

        self.down, self.deep = block(1, width), block(width, 2 * width)
        self.up, self.joined = nn.ConvTranspose3d(2 * width, width, 2, 2), block(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, volume: Tensor, label: Tensor) -> Tensor:
        high = self.down(volume)
        low = self.deep(F.max_pool3d(high, 2))
        logits = self.head(self.joined(torch.cat([high, self.up(low)], 1)))
        chances = logits.softmax(1)
        truth = F.one_hot(label, logits.shape[1]).permute(0, 4, 1, 2, 3).float()
        overlap = (chances * truth).sum((2, 3, 4))
        dice = 1 - 2 * overlap / (chances.sum((2, 3, 4)) + truth.sum((2, 3, 4)) + 1e-6)
        return F.cross_entropy(logits, label) + dice.mean()


def volumes(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    volume = torch.randn(1, 1, 16, 16, 16, generator=generator)
    return {"volume": volume, "label": torch.randint(0, 3, (1, 16, 16, 16), generator=generator)}


class Boxes(nn.Module):
    """SSD: heads on three sizes of features; objects are matched with anchors, and the hardest negatives mined."""

    def __init__(self, classes: int = 6, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 4, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(3)
        )
        self.classes = classes
        self.kinds = nn.ModuleList(nn.Conv2d(width, 4 * classes, 3, padding=1) for _ in range(3))
        self.places = nn.ModuleList(nn.Conv2d(width, 4 * 4, 3, padding=1) for _ in range(3))
        centres = [torch.cartesian_prod(*[(torch.arange(side) + 0.5) / side] * 2) for side in (8, 4, 2)]
        sizes = [torch.linspace(0.6, 2.4, 4) / side for side in (8, 4, 2)]
        anchors = [
            torch.cat([place[:, None].expand(-1, 4, 2), size[None, :, None].expand(len(place), 4, 2)], -1).reshape(
                -1, 4
            )
            for place, size in zip(centres, sizes, strict=True)
        ]
        self.register_buffer("anchors", torch.cat(anchors))

    def forward(self, image: Tensor, boxes: Tensor, kinds: Tensor, counts: Tensor) -> Tensor:
        features, logits, offsets = self.stem(image), [], []
        for stage, kind, place in zip(self.stages, self.kinds, self.places, strict=True):
            features = stage(features)
            logits.append(kind(features).permute(0, 2, 3, 1).reshape(len(image), -1, self.classes))
            offsets.append(place(features).permute(0, 2, 3, 1).reshape(len(image), -1, 4))
        return self.loss(torch.cat(logits, 1), torch.cat(offsets, 1), boxes, kinds, counts)

    def loss(self, logits: Tensor, offsets: Tensor, boxes: Tensor, kinds: Tensor, counts: Tensor) -> Tensor:
        total = logits.new_zeros(())
        for number, count in enumerate(counts.tolist()):  # as many objects as each image has
            best, which = overlap(self.anchors, boxes[number, :count]).max(1)
            found = best > 0.5
            wanted = torch.where(found, kinds[number, :count][which], 0)
            target = boxes[number, :count][which] - self.anchors
            place = F.smooth_l1_loss(offsets[number][found], target[found], reduction="sum")
            each = F.cross_entropy(logits[number], wanted, reduction="none")
            negative = each.detach().masked_fill(found, 0).argsort(descending=True).argsort()
            hard = found | (negative < 3 * found.sum())
            total = total + (place + (each * hard).sum()) / found.sum().clamp(min=1)
        return total / len(logits)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of boxes (centre and size): [N, 4], [M, 4] -> [N, M]."""
    low = torch.maximum(*((b[..., :2] - b[..., 2:] / 2) for b in (one[:, None], other[None])))
    high = torch.minimum(*((b[..., :2] + b[..., 2:] / 2) for b in (one[:, None], other[None])))
    common = (high - low).clamp(min=0).prod(-1)
    return common / (one[:, None, 2:].prod(-1) + other[None, :, 2:].prod(-1) - common)


def objects(seed: int, images: int = 4, most: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    place = torch.rand(images, most, 2, generator=generator) * 0.6 + 0.2
    size = torch.rand(images, most, 2, generator=generator) * 0.3 + 0.1
    return {
        "image": torch.randn(images, 3, 64, 64, generator=generator),
        "boxes": torch.cat([place, size], -1),
        "kinds": torch.randint(1, 6, (images, most), generator=generator),
        "counts": torch.randint(2, most + 1, (images,), generator=generator),
    }


class Go(nn.Module):
    """MiniGo: residual blocks, and heads for the next move and the winner."""

    def __init__(self, width: int = 32, blocks: int = 4, board: int = 9) -> None:
        super().__init__()

        def layer(into: int, out: int, kernel: int = 3) -> nn.Module:
            return nn.Sequential(nn.Conv2d(into, out, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(out))

        self.stem = layer(13, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(layer(width, width), nn.ReLU(), layer(width, width)) for _ in range(blocks)
        )
        self.moves = nn.Sequential(layer(width, 2, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(board * board + 1))
        self.winner = nn.Sequential(layer(width, 1, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(32), nn.ReLU())
        self.score = nn.Linear(32, 1)

    def forward(self, stones: Tensor, moves: Tensor, winner: Tensor) -> Tensor:
        x = self.stem(stones).relu()
        for block in self.blocks:
            x = (x + block(x)).relu()
        score = self.score(self.winner(x)).squeeze(1).tanh()
        return F.cross_entropy(self.moves(x), moves) + F.mse_loss(score, winner)


def positions(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "stones": torch.randint(0, 2, (16, 13, 9, 9), generator=generator).float(),
        "moves": torch.rand(16, 82, generator=generator).softmax(1),
        "winner": torch.randint(0, 2, (16,), generator=generator).float() * 2 - 1,
    }


def bert() -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    return BertForPreTraining(
        BertConfig(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, vocab_size=500,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def sentences(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 500, (8, 64), generator=generator)
    lengths = torch.randint(20, 65, (8, 1), generator=generator)
    mask = (torch.arange(64) < lengths).long()
    hidden = (torch.rand(8, 64, generator=generator) < 0.15) & mask.bool()
    return {
        "input_ids": tokens.masked_fill(hidden, 4),
        "attention_mask": mask,
        "labels": tokens.masked_fill(~hidden, -100),
        "next_sentence_label": torch.randint(0, 2, (8,), generator=generator),
    }


def resnet_config(*more: str) -> Any:
    """more: stages whose features a detector or a decoder of masks takes, besides the last three."""
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic", num_labels=10,
        out_features=[*more, "stage2", "stage3", "stage4"],
    )  # fmt: skip


def resnet() -> nn.Module:
    from transformers import ResNetForImageClassification

    return ResNetForImageClassification(resnet_config())


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(8, 3, 64, 64, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (8,), generator=generator)}


MOST = 3  # objects in a scene


class Detector(nn.Module):
    """RT-DETR with its top-k over places, heads, and a loss for the queries that are nearest to the objects.

    Each object takes the nearest query that is left; transformers' own loss solves the assignment on the host.
    """

    def __init__(self, queries: nn.Module, width: int = 32, classes: int = 6) -> None:
        super().__init__()
        self.queries = queries
        self.kinds, self.places = nn.Linear(width, classes), nn.Linear(width, 4)

    def forward(self, image: Tensor, boxes: Tensor, kinds: Tensor, counts: Tensor) -> Tensor:
        found = self.queries(pixel_values=image)
        total = found.enc_topk_logits.sigmoid().mean() + found.enc_topk_bboxes.mean()
        for hidden in found.intermediate_hidden_states.unbind(1):  # each layer of the decoder has a loss
            scores, places = self.kinds(hidden), self.places(hidden).sigmoid()
            for number, count in enumerate(counts.tolist()):
                near = nearest(places[number], boxes[number, :count])
                wanted = torch.zeros_like(scores[number])
                wanted[near, kinds[number, :count]] = 1
                total = total + F.binary_cross_entropy_with_logits(scores[number], wanted)
                total = total + F.l1_loss(places[number][near], boxes[number, :count])
        return total


def nearest(places: Tensor, boxes: Tensor) -> Tensor:
    """For each object, of which there are few, the place that no other object takes: [Q, 4], [N, 4] -> int64 [N]."""
    far = torch.cdist(places.detach(), F.pad(boxes, (0, 0, 0, MOST))[:MOST], p=1)
    taken = []
    for number in range(MOST):
        taken.append(far[:, number].argmin())
        far = far.index_fill(0, taken[-1], float("inf"))
    return torch.stack(taken)[: len(boxes)]


def rt_detr() -> nn.Module:
    from transformers import RTDetrConfig, RTDetrModel, RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(
        backbone_config=backbone, num_labels=6, encoder_hidden_dim=32, encoder_in_channels=[32, 48, 64],
        encoder_ffn_dim=64, d_model=32, num_queries=30, decoder_in_channels=[32, 32, 32], decoder_ffn_dim=64,
        decoder_layers=1, decoder_attention_heads=4, num_denoising=0, hidden_expansion=0.5, encoder_attention_heads=4,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return Detector(RTDetrModel(config))


def scenes(seed: int) -> Batch:
    given = objects(seed, images=2, most=MOST)
    return {**given, "image": F.interpolate(given["image"], scale_factor=2)}


def maskformer() -> nn.Module:
    """Its loss stays eager, as in scripts that compile the model alone: scipy would end a graph at each image, and the
    pieces between would be compiled anew for other numbers of objects.
    """
    from transformers import DetrConfig, MaskFormerConfig, MaskFormerForInstanceSegmentation

    decoder = DetrConfig(
        d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64, num_queries=12, dropout=0.0
    )
    config = MaskFormerConfig(
        fpn_feature_size=32, mask_feature_size=32, backbone_config=resnet_config("stage1"), decoder_config=decoder,
        num_labels=5,
    )  # fmt: skip
    model = MaskFormerForInstanceSegmentation(config)
    model.criterion.forward = torch.compiler.disable(model.criterion.forward)
    return model


def masks(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 5, (2,), generator=generator).tolist()
    return {
        "pixel_values": torch.randn(2, 3, 64, 64, generator=generator),
        "mask_labels": [(torch.rand(count, 64, 64, generator=generator) > 0.6).float() for count in counts],
        "class_labels": [torch.randint(0, 5, (count,), generator=generator) for count in counts],
    }


WORKLOADS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "BERT": (bert, sentences),
    "ResNet": (resnet, images),
    "RT-DETR": (rt_detr, scenes),
    "MaskFormer": (maskformer, masks),
    "DLRM": (Recommender, recommendations),
    "RNN-T": (Transducer, utterances),
    "3D U-Net": (Volumes, volumes),
    "SSD": (Boxes, objects),
    "MiniGo": (Go, positions),
}
MATCHED = ("MaskFormer",)  # with objects, by scipy


def missing(name: str) -> str:
    """Why a workload cannot run here; "" if it can."""
    if name in MATCHED and importlib.util.find_spec("scipy") is None:
        return "its loss matches queries with objects by scipy, which is not installed"
    return ""


def workload(name: str, device: str, count: int = 4) -> tuple[nn.Module, list[Batch]]:
    """A model in training mode, whose call with a batch's items as keywords has a loss, and batches."""
    make, batch = WORKLOADS[name]
    torch.manual_seed(0)
    model, batches = make(), [batch(seed) for seed in range(count)]
    if any(isinstance(module, nn.LazyLinear) for module in model.modules()):
        model(**batches[0])
    return model.to(device).train(), [to(batch, device) for batch in batches]


def to(value: Any, device: str) -> Any:
    if isinstance(value, Mapping):
        return {key: to(each, device) for key, each in value.items()}
    if isinstance(value, list):
        return [to(each, device) for each in value]
    return value.to(device)


def loss_of(found: Any) -> Tensor:
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    return loss.sum()
