"""The table: how people write the loop over the experts, and what looks like it and is not.

`SPELLINGS` all compute `Moe.reference`; `DECOYS` compute something else. `cases()` gives the pairs of a spelling and a
kind of experts that tests run.
"""

from __future__ import annotations

import torch

from tests.experts import decoys, loops
from tests.experts import loops_sorted as cut
from tests.experts.models import (
    Experts,
    GeluLinears,
    GeluStacked,
    GptOss,
    LoraLinears,
    LoraStacked,
    Moe,
    ReluSquaredLinears,
    Spelling,
    SwiGluFlat,
    SwiGluLinears,
    SwiGluSeparate,
    SwiGluStacked,
    SwiGluTransposed,
    UnequalWidths,
    WithIdentity,
    sigmoid_in_groups,
    sigmoid_of_topk,
    softmax_then_topk,
    topk_then_softmax,
)

LISTED = (SwiGluLinears,)
BFLOAT16 = torch.bfloat16

_QUERIES = [
    Spelling("where_pairs", loops.where_pairs, "DeepSeek-V3 inference/model.py without its skip; most rewrites"),
    Spelling("where_mask_slots_first", loops.where_mask_slots_first, "transformers 4: Mixtral, Qwen2-MoE, OLMoE"),
    Spelling("where_mask_tokens_first", loops.where_mask_tokens_first, "tutorials: permute(2, 0, 1)"),
    Spelling("nonzero_tuple", loops.nonzero_tuple, "mistral-inference's MoeLayer, with nonzero for where"),
    Spelling("nonzero_columns", loops.nonzero_columns, "tutorials: hits[:, 0], hits[:, 1]; index_put_(accumulate)"),
    Spelling("nonzero_unbind", loops.nonzero_unbind, "tutorials: nonzero(as_tuple=False).unbind(1)"),
    Spelling("any_slot_squeeze", loops.any_slot_squeeze, "scores summed over slots; nonzero().squeeze(-1)"),
    Spelling("any_slot_flatten", loops.any_slot_flatten, "nonzero().flatten(); out[tok] = out[tok] + y"),
    Spelling("bool_mask_add", loops.bool_mask_add, "tutorials (makeMoE): out[mask] += y"),
    Spelling("bool_mask_scores", loops.bool_mask_scores, "the same, scores by weights[idx == e]"),
    Spelling("bool_mask_each_slot", loops.bool_mask_each_slot, "a loop over slots around the loop over experts"),
    Spelling("where_each_slot", loops.where_each_slot, "the same with one-dimensional torch.where"),
    Spelling("bool_mask_assign", loops.bool_mask_assign, "Switch Transformer: top-1, out[mask] = y", top=1),
    Spelling("masked_select", loops.masked_select, "masked_select and masked_scatter"),
    Spelling("masked_select_columns", loops.masked_select_columns, "the same, scores by scores[:, e]"),
    Spelling("dense_scores", loops.dense_scores, "scores scattered to [T, E], gathered as dense[tok, e]"),
    Spelling("dense_scores_mask", loops.dense_scores_mask, "NLLB-MoE in transformers 4: router_mask[..., e].bool()"),
    Spelling("repeated_mask", loops.repeated_mask, "DeepSeek-MoE, DeepSeek-V2 training: x.repeat_interleave(k, 0)"),
    Spelling("repeated_where", loops.repeated_where, "the same with torch.where and einsum"),
    Spelling("flat_pairs", loops.flat_pairs, "pairs in one dimension, pairs // k; scatter_add_"),
    Spelling("scatter_added", loops.scatter_added, "scatter_add_ with a repeated index"),
    Spelling("gathered_in_float", loops.gathered_in_float, "the sum in float32", dtype=BFLOAT16),
    Spelling("from_the_last", loops.from_the_last, "experts in descending order", top=3),
    Spelling(
        "scaled_input", loops.scaled_input, "Llama 4: the score scales the input",
        router=sigmoid_of_topk, scales_input=True,
    ),
    Spelling("local_slice", loops.where_pairs, "DeepSeek-V3 inference: the experts of one rank", local=(1, 3)),
    Spelling("shared_expert", loops.where_pairs, "DeepSeek, Qwen2-MoE: an expert of all tokens beside", shared=True),
    Spelling("top_three", loops.where_pairs, "three experts a token: the order of sums shows", top=3),
    Spelling("mixed_dtypes", loops.where_pairs, "router in float32, experts in bfloat16", dtype=BFLOAT16),
]  # fmt: skip

_EXPERTS = [
    Spelling("fused_transposed", loops.where_mask_slots_first, "transformers 5: F.linear", experts=(SwiGluTransposed,)),
    Spelling("flat_parameter", loops.where_mask_slots_first, "DBRX: one matrix viewed as E", experts=(SwiGluFlat,)),
    Spelling("gelu_biases", loops.where_pairs, "GELU with biases", experts=(GeluStacked, GeluLinears)),
    Spelling("relu_squared", loops.where_pairs, "Nemotron, modded-nanogpt", experts=(ReluSquaredLinears,)),
    Spelling("lora", loops.where_pairs, "PEFT: adapters on the experts", experts=(LoraStacked, LoraLinears)),
    Spelling(
        "gpt_oss", loops.where_mask_slots_first, "GPT-OSS: clamped, interleaved SwiGLU",
        experts=(GptOss,), router=topk_then_softmax,
    ),
    Spelling(
        "deepseek_v3", loops.where_pairs, "DeepSeek-V3: sigmoid router, groups of experts, shared expert",
        router=sigmoid_in_groups, shared=True,
    ),
    Spelling("unequal_widths", loops.where_pairs, "experts of two sizes", experts=(UnequalWidths,), identical=False),
    Spelling("identity_expert", loops.where_pairs, "LongCat-Flash", experts=(WithIdentity,), identical=False),
]  # fmt: skip

_SORTED = [
    Spelling(
        "split_counts", cut.split_counts, "torchtitan: histc, torch.split by counts.tolist()",
        experts=(SwiGluSeparate, SwiGluLinears),
    ),
    Spelling("split_bincount", cut.split_bincount, "the same with bincount"),
    Spelling("split_one_hot_counts", cut.split_one_hot_counts, "JetMoe, GraniteMoe in transformers 4"),
    Spelling("slices_of_counts", cut.slices_of_counts, "a running start; the rows put back by y[order] = ..."),
    Spelling("slices_of_offsets", cut.slices_of_offsets, "Aria's sequential_experts_gemm: offsets"),
    Spelling("padded_split", cut.padded_split, "prime-rl: padding rows at the end", experts=(SwiGluSeparate,)),
    Spelling("concatenated", cut.concatenated_then_unsorted, "results in a list, torch.cat, argsort back"),
]  # fmt: skip

_SKIPPING = [
    Spelling("skip_numel", loops.skip_numel, "if tok.numel() == 0: continue", skips_empty=True),
    Spelling("skip_shape", loops.skip_shape, "transformers 4 Mixtral: if top_x.shape[0] == 0", skips_empty=True),
    Spelling("where_lists", loops.where_lists, "transformers 4.36 Mixtral: x[None, tok.tolist()]", skips_empty=True),
    Spelling("skip_len", loops.skip_len, "if len(tok) > 0", skips_empty=True),
    Spelling(
        "skip_counts", loops.skip_counts, "DeepSeek-V3 inference/model.py: bincount().tolist(), where",
        skips_empty=True, local=(1, 4),
    ),
    Spelling("skip_mask_any", loops.skip_mask_any, "tutorials (makeMoE): if mask.any()", skips_empty=True),
    Spelling("skip_mask_sum", loops.skip_mask_sum, "if mask.sum() == 0", skips_empty=True),
    Spelling(
        "hit_tensor", loops.hit_tensor, "transformers 5: for e in hit, weights[e] by a tensor",
        skips_empty=True, experts=(SwiGluTransposed, GptOss),
    ),
    Spelling("hit_list", loops.hit_list, "transformers 5 and forks: hit.tolist()", skips_empty=True),
    Spelling("unique_tensor", loops.unique_tensor, "for e in torch.unique(idx)", True, experts=(SwiGluStacked,)),
    Spelling("unique_list", loops.unique_list, "for e in idx.unique().tolist()", skips_empty=True),
    Spelling("moe_infer", cut.moe_infer, "DeepSeek-V2, V3 moe_infer: counts by numpy, cat, unsort", skips_empty=True),
    Spelling("numpy_ends", cut.numpy_ends, "DeepSeek-MoE moe_infer: cumulative counts by numpy", skips_empty=True),
    Spelling("skip_count_slices", cut.skip_count_slices, "if count > 0 around slices", skips_empty=True),
]  # fmt: skip

SPELLINGS: dict[str, Spelling] = {s.name: s for s in [*_QUERIES, *_EXPERTS, *_SORTED, *_SKIPPING]}

DECOYS: dict[str, Spelling] = {
    s.name: s
    for s in [
        Spelling("centred_rows", decoys.centred_rows, "the mean over the expert's tokens is taken off"),
        Spelling("softmax_over_rows", decoys.softmax_over_rows, "softmax over the expert's tokens"),
        Spelling("running_sum", decoys.running_sum, "cumsum over the expert's tokens"),
        Spelling("attends_within_expert", decoys.attends_within_expert, "attention among the expert's tokens"),
        Spelling("flipped_rows", decoys.flipped_rows, "rows in another order than their weights"),
        Spelling("scaled_by_load", decoys.scaled_by_load, "divided by the number of tokens"),
        Spelling("batch_norm", decoys.plain, "BatchNorm in the expert", experts=(decoys.BatchNorms,)),
        Spelling("dropout", decoys.plain, "random numbers in the expert", experts=(decoys.Dropouts,)),
        Spelling("unequal_activations", decoys.plain, "", identical=False, experts=(decoys.UnequalActivations,)),
        Spelling("unequal_constants", decoys.unequal_constants, "times e + 1", identical=False),
        Spelling("one_detached", decoys.one_detached, "one branch has no gradient", identical=False),
        Spelling("other_index", decoys.other_index, "one branch asks another routing", identical=False),
        Spelling("overlapping", decoys.overlapping, "idx >= e: the branches share tokens"),
        Spelling("capacity_drop", decoys.capacity_drop, "the first 5 tokens of an expert only"),
        Spelling("last_expert_wins", decoys.last_expert_wins, "out[tok] = y overwrites"),
        Spelling("writes_its_input", decoys.writes_its_input, "x changes between experts, in place"),
        Spelling("chained", decoys.chained, "an expert's output is the next one's input"),
        Spelling("reads_the_sum", decoys.reads_the_sum, "an expert sees the sum so far"),
        Spelling("decayed_sum", decoys.decayed_sum, "the sum shrinks between experts"),
        Spelling("reroutes", decoys.reroutes, "the routing changes between experts"),
        Spelling("weight_changes", decoys.weight_changes, "the scores change between experts", identical=False),
    ]
}


def cases(table: dict[str, Spelling]) -> list[tuple[Spelling, type[Experts]]]:
    return [(spelling, kind) for spelling in table.values() for kind in spelling.experts]


def name_of(case: tuple[Spelling, type[Experts]]) -> str:
    return f"{case[0].name}-{case[1].__name__}"


__all__ = ["DECOYS", "SPELLINGS", "Moe", "Spelling", "cases", "name_of", "softmax_then_topk"]
