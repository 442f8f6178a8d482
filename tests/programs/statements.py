"""What random programs are made of: numbers that are read from a batch, statements of a layer, poolings and losses.

A layer's statements see `x` [B, T, WIDTH], `mask` [B, T] (bool), `lengths` [B] and `self`, and leave an `x` and a
`mask` of any number of tokens. NUMBER stands for a number of the batch, which is at least 1. What they need of `self`
is made by the lines of `PARTS`. Values stay bounded, so that programs of many layers can be compared in float32.
"""

from __future__ import annotations

NUMBERS = [
    "lengths.max().item()",
    "int(lengths.max())",
    "int(lengths.min())",
    "lengths.min().item()",
    "lengths.sum().item()",
    "lengths.tolist()[0]",
    "lengths[-1].item()",
    "max(lengths.tolist())",
    "sum(lengths.tolist())",
    "int(mask.sum(1).max())",
    "int(mask.sum())",
    "mask.any(0).sum().item()",
    "int((lengths > 2).sum()) + 1",
    "lengths.argmax().item() + 1",
    "min(lengths.max().item(), 6)",
    "max(lengths.max().item(), 4)",
    "lengths.max().item() // 2 + 1",
    "math.ceil(lengths.max().item() / 2)",
    "int(lengths.max().item() * 0.75) + 1",
    "int(lengths.float().mean().item())",
    "round(lengths.max().item() / 3) + 1",
    "(lengths.max() - lengths.min()).item() + 1",
    "torch.unique(lengths).numel()",
    "mask.nonzero().shape[0]",
    "lengths.cpu().max().item()",
    "lengths.cumsum(0)[-1].item()",
    "x.shape[1]",
    "len(lengths)",
]

CONDITIONS = [
    "NUMBER > 5",
    "NUMBER % 2 == 0",
    "NUMBER == x.shape[1]",
    "NUMBER * 0.7 * 10 >= 21",
    "1 < NUMBER <= 8",
    "lengths.max() > 4",
    "(lengths == 1).any()",
    "mask.all()",
    "not mask.all()",
    "lengths[0] < lengths[-1]",
    "torch.equal(lengths, lengths.sort().values)",
    "NUMBER > 3 and self.training",
    "lengths.max() >= x.shape[1] or NUMBER < 4",
    "3 in lengths.tolist()",
    "bool((lengths > 6).any())",
    "x.shape[0] > 2",
]

# What is done to some of the tokens, y [B, some, WIDTH].
ON_TOKENS = [
    "torch.softmax({y}, -1)",
    "F.layer_norm({y}, (WIDTH,))",
    "F.rms_norm({y}, (WIDTH,))",
    "self.norm({y})",
    "torch.tanh(self.linear({y}))",
    "F.gelu(self.linear(self.norm({y})))",
    "F.normalize({y} + 2, dim=-1)",
    "{y} - {y}.mean(1, keepdim=True)",
    "{y}.cumsum(1) / {y}.shape[1]",
    "{y}.flip(1)",
    "{y}.var(1, unbiased=False, keepdim=True) * {y}",
    "{y} * torch.softmax({y}.sum(-1), 1)[..., None]",
    "{y}.sort(1).values",
    "({y} @ {y}.transpose(1, 2)).softmax(-1) @ {y}",
    "{y}.roll(1, 1)",
    "torch.cat([{y}[:, :1], {y}[:, 1:] * 0.5], 1)",
    "{y} + torch.arange({y}.shape[1])[None, :, None] * 0.01",
    "{y} + {y}.amax(1, keepdim=True).detach()",
    "F.silu({y}) * torch.sigmoid({y})",
    "{y}.transpose(1, 2).contiguous().transpose(1, 2)",
    "{y}.reshape(-1, WIDTH).view({y}.shape)",
]

LAYER = [
    # Trimming
    """
    x = x[:, : NUMBER]
    mask = mask[:, : x.shape[1]]
    """,
    """
    n = min(NUMBER, x.shape[1])
    x, mask = x[:, :n], mask[:, :n]
    x = ON_TOKENS(x)
    """,
    """
    y = x[:, : NUMBER]
    y = ON_TOKENS(y)
    x = x + F.pad(y, (0, 0, 0, x.shape[1] - y.shape[1]))
    """,
    """
    y = x[:, : lengths.max()]
    y = ON_TOKENS(y)
    x = torch.cat([y, x[:, lengths.max() :]], 1)
    """,
    "x = x + x[:, : NUMBER][:, -1:]",
    "x = x - x[:, : NUMBER][:, :1] * 0.5",
    "x = x * torch.tanh(x[:, : NUMBER].sum(1, keepdim=True))",
    "x = torch.tanh(x + x[:, lengths.max().item() - 1].unsqueeze(1))",
    """
    half = NUMBER // 2
    x = torch.cat([ON_TOKENS(x[:, half:]), x[:, :half]], 1)
    mask = torch.cat([mask[:, half:], mask[:, :half]], 1)
    """,
    # Numbers in arithmetic
    "x = x * (1.0 / NUMBER)",
    "x = x / NUMBER ** 0.5",
    "x = x + NUMBER * 0.01",
    "x = x + torch.as_tensor([NUMBER, x.shape[1]]).sum() * 0.01",
    "x = x + torch.as_tensor(NUMBER) * 0.01",
    "x = x + torch.tensor(NUMBER) * 0.01",
    "x = x + x.new_tensor([NUMBER]) * 0.01",
    "x = x * torch.full((1,), NUMBER, dtype=x.dtype) * 0.1",
    "x = x + x[:, [0, min(NUMBER, x.shape[1]) - 1]].mean(1, keepdim=True)",
    """
    n = min(NUMBER, x.shape[1])
    scale = torch.linspace(0, 1, n, dtype=x.dtype)
    x = torch.cat([x[:, :n] * scale[:, None], x[:, n:]], 1)
    """,
    """
    total, longest = lengths.sum().item(), lengths.max().item()
    filled = total / (longest * x.shape[0])
    x = x * filled
    """,
    """
    capacity = int(NUMBER * 0.15 * 3) + 1
    x = x * capacity / 10
    """,
    # Masks
    """
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    x = ON_TOKENS(x) * inside[..., None]
    """,
    "x = x.masked_fill(~mask[..., None], 0.0)",
    "x = torch.where(mask[..., None], ON_TOKENS(x), x)",
    """
    bias = torch.zeros(x.shape[0], x.shape[1])
    for row, length in enumerate(lengths.tolist()):
        bias[row, length:] = -1
    x = x + bias[..., None]
    """,
    """
    keep = torch.ones_like(mask)
    keep[:, NUMBER :] = False
    x = ON_TOKENS(x) * keep[..., None]
    """,
    # Selections
    """
    y = x[mask]
    y = torch.tanh(self.linear(y))
    out = torch.zeros_like(x)
    out[mask] = y
    x = x + out
    """,
    """
    rows = mask.flatten().nonzero().flatten()
    y = self.norm(x.reshape(-1, WIDTH)[rows])
    x = x.reshape(-1, WIDTH).index_add(0, rows, y).view(x.shape)
    """,
    """
    y = x[mask]
    x = x + y.mean(0)
    """,
    """
    parts = torch.split(x[mask], mask.sum(1).tolist())
    x = x + torch.stack([torch.tanh(part.sum(0)) for part in parts])[:, None]
    """,
    """
    texts = [x[row, :length] for row, length in enumerate(lengths.tolist())]
    x = x + torch.stack([text.mean(0) for text in texts]).unsqueeze(1)
    """,
    """
    texts = [x[row, :length] for row, length in enumerate(lengths.clamp(max=x.shape[1]).tolist())]
    x = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    """,
    # Attention
    """
    allowed = mask[:, None, None, :]
    q = self.linear(x).view(x.shape[0], -1, 2, WIDTH // 2).transpose(1, 2)
    k = v = x.view(x.shape[0], -1, 2, WIDTH // 2).transpose(1, 2)
    allowed = allowed | torch.eye(x.shape[1], dtype=torch.bool)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    x = x + y.transpose(1, 2).reshape(x.shape)
    """,
    """
    scores = self.linear(x) @ x.transpose(1, 2) / WIDTH**0.5
    at = torch.arange(x.shape[1])
    allowed = (at[:, None] >= at) & (at[:, None] - at < NUMBER)
    x = x + torch.softmax(scores.masked_fill(~allowed, -1e9), -1) @ x
    """,
    """
    bias = torch.zeros(x.shape[1], x.shape[1])
    bias[:, NUMBER :] = float("-inf")
    scores = x @ self.linear(x).transpose(1, 2) + bias
    x = x + torch.softmax(scores, -1) @ x
    """,
    """
    document = torch.cumsum(mask.long(), 1) // 3
    same = document[:, :, None] == document[:, None, :]
    bias = torch.where(same, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
    x = x + F.scaled_dot_product_attention(self.linear(x), x, x, attn_mask=bias)
    """,
    # Experts
    """
    rows = x.reshape(-1, WIDTH)
    weights, chosen = torch.softmax(self.router(rows), -1).topk(2, -1)
    out = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        token, choice = torch.where(chosen == expert)
        out.index_add_(0, token, torch.tanh(self.experts[expert](rows[token])) * weights[token, choice, None])
    x = x + out.view(x.shape)
    """,
    """
    rows = x.reshape(-1, WIDTH)
    score, chosen = torch.softmax(self.router(rows), -1).max(-1)
    out = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        token = (chosen == expert).nonzero().flatten()
        if token.numel() == 0:
            continue
        out[token] = F.silu(self.experts[expert](rows[token])) * score[token, None]
    x = x + out.view_as(x)
    """,
    """
    rows = x.reshape(-1, WIDTH)
    score, chosen = torch.softmax(self.router(rows), -1).max(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
    parts = rows[order].split(counts)
    done = torch.cat([torch.tanh(expert(part)) for expert, part in zip(self.experts, parts)])
    out = torch.zeros_like(rows).index_copy(0, order, done)
    x = x + (out * score[:, None]).view(x.shape)
    """,
    """
    rows = x[mask]
    chosen = self.router(rows).argmax(-1)
    self.load += torch.bincount(chosen, minlength=EXPERTS)
    out = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        hit = chosen == expert
        out[hit] = self.experts[expert](rows[hit])
    x = x.masked_scatter(mask[..., None].expand_as(x), torch.tanh(out))
    """,
    # Branches and loops
    """
    if CONDITION:
        x = ON_TOKENS(x)
    """,
    """
    if CONDITION:
        x = torch.tanh(x)
    else:
        x = ON_TOKENS(x) * 0.5
    """,
    "x = ON_TOKENS(x) if CONDITION else x",
    """
    if CONDITION:
        if CONDITION:
            x = x * 0.9
        x = ON_TOKENS(x)
    """,
    """
    for step in range(min(NUMBER, 3)):
        x = x + torch.sin(x) / (step + 1)
    """,
    """
    for start in range(0, x.shape[1], 4):
        x = x + torch.tanh(x[:, start : start + 4].mean(1, keepdim=True))
    """,
    """
    longest = 0
    for length in lengths.tolist():
        longest = max(longest, length)
    x = x / longest
    """,
    # Writes
    """
    x = x.clone()
    x[:, 0] = x[:, min(NUMBER, x.shape[1]) - 1]
    """,
    """
    x = ON_TOKENS(x).clone()
    x[~mask] = 0
    """,
    """
    x = torch.tanh(x)
    x.mul_(0.5).add_(NUMBER * 0.01)
    """,
    """
    y = x.new_zeros(x.shape)
    y[:, : NUMBER] += x[:, : NUMBER]
    x = x + y
    """,
    """
    x = x + 0
    x[:, : NUMBER].masked_fill_(~mask[:, : NUMBER, None], 0.1)
    """,
    # Buffers
    "self.seen += NUMBER",
    """
    self.steps += 1
    x = x / (1 + self.steps)
    """,
    """
    self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    x = x - self.average
    """,
    """
    self.longest = torch.maximum(self.longest, lengths.max())
    x = x / (1 + self.longest)
    """,
    """
    if self.training:
        self.average.copy_(torch.lerp(self.average, x.detach().amax((0, 1)), 1 / NUMBER))
    x = x + self.average
    """,
    "x = x + self.batch_norm(x.transpose(1, 2)).transpose(1, 2) if x.numel() > WIDTH else x",
    # Plain
    "x = ON_TOKENS(x)",
    "x = x + self.mlp(self.norm(x))",
    "x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)",
    "x = x + self.positions[: x.shape[1]]",
]

# To one vector for each text, y [B, WIDTH].
POOLINGS = [
    "y = x[:, 0]",
    "y = x[torch.arange(x.shape[0]), (lengths - 1).clamp(max=x.shape[1] - 1)]",
    "y = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)",
    "y = x.masked_fill(~mask[..., None], -1e4).amax(1)",
    "y = x[:, : NUMBER].mean(1)",
    "y = x[:, : lengths.max().item()].amax(1)",
    "y = torch.stack([x[row, : int(length)].mean(0) for row, length in enumerate(lengths)])",
    "y = F.adaptive_avg_pool1d(x.transpose(1, 2), 1)[..., 0]",
    "y = F.max_pool1d(x.transpose(1, 2)[..., : NUMBER], 1).amax(-1)",
    """
    y = x.new_zeros(x.shape[0], WIDTH)
    row = mask.nonzero()[:, 0]
    y = y.index_add(0, row, x[mask]) / lengths[:, None]
    """,
]

# Of `x`, `labels` [B, x.shape[1]] with -100 where nothing is to be learnt, and `target` [B]; to one number.
LOSSES = [
    """
    logits = self.head(x)
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100)
    """,
    """
    logits = self.head(x[:, :-1]).float() if x.shape[1] > 1 else self.head(x).float()
    labels = labels[:, -logits.shape[1] :]
    count = (labels != -100).sum().item()
    loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum", ignore_index=-100) / max(count, 1)
    """,
    """
    kept = labels != -100
    logits = self.head(x[kept])
    loss = F.cross_entropy(logits, labels[kept]) if kept.any() else x.sum() * 0
    """,
    """
    chosen = torch.log_softmax(self.head(x), -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = -(chosen * (labels >= 0)).sum() / (labels >= 0).sum().clamp(min=1)
    """,
    """
    POOLING
    loss = F.cross_entropy(self.head(y), target)
    """,
    """
    POOLING
    loss = F.mse_loss(torch.tanh(self.score(y))[:, 0], target.to(x.dtype) / VOCABULARY)
    """,
    """
    POOLING
    y = F.normalize(y + 1e-3, dim=-1)
    loss = F.cross_entropy(y @ y.T * 5, torch.arange(y.shape[0]))
    """,
    """
    POOLING
    loss = F.binary_cross_entropy_with_logits(self.score(y)[:, 0], (target % 2).to(x.dtype))
    if CONDITION:
        loss = loss * 0.5
    """,
    """
    error = (self.score(x)[..., 0] - labels / VOCABULARY).square() * mask
    loss = error.sum() / NUMBER
    """,
]

# What a module needs for the names that its statements use.
PARTS = {
    "self.linear": "nn.Linear(WIDTH, WIDTH)",
    "self.norm": "nn.LayerNorm(WIDTH)",
    "self.mlp": "nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))",
    "self.conv": "nn.Conv1d(WIDTH, WIDTH, 3, padding=1)",
    "self.batch_norm": "nn.BatchNorm1d(WIDTH)",
    "self.router": "nn.Linear(WIDTH, EXPERTS)",
    "self.experts": "nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))",
    "self.head": "nn.Linear(WIDTH, VOCABULARY)",
    "self.score": "nn.Linear(WIDTH, 1)",
    "self.positions": "nn.Parameter(torch.randn(64, WIDTH) * 0.1)",
    "self.seen": "torch.zeros((), dtype=torch.long)",
    "self.steps": "torch.zeros((), dtype=torch.long)",
    "self.longest": "torch.zeros((), dtype=torch.long)",
    "self.load": "torch.zeros(EXPERTS, dtype=torch.long)",
    "self.average": "torch.zeros(WIDTH)",
}
