"""The lists of Qwen's sparse attention and of DeepSeek's CSA by nsa.score_blocks, beside those of transformers' own
indexers (qwen4_exp, deepseek_v4).

    family.py

Twins: examples/family/qsa.c and csa.c, which have the definitions in double. Not in CI: transformers.sh runs it at the
newest transformers. Not here: attention over the lists.
"""
import sys

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

import nsa

WIDTH, HEADS, DIM, GROUP, COUNT = 64, 4, 16, 4, 14


def our_lists(q, k, tokens, weights=None, tail=0):
    """Groups of tokens that each query reads, -1 behind the last, and the scores of all groups."""
    d = nsa.desc(1, tokens, HEADS, 1, DIM, slc_block=GROUP, slc_count=COUNT, forced=nsa.Forced.TAIL, slc_init=0,
                 slc_local=tail)
    lists = np.zeros((1, tokens, 1, COUNT + tail), np.int32)
    scores = np.zeros((1, tokens, 1, -(-tokens // GROUP)), np.float32)
    x = nsa.Score(act=nsa.ScoreAct.RELU, q=q, k=k, blocks=lists, scores=scores, stride=GROUP)
    if weights is not None:
        x.weights = weights
    nsa.score_blocks(x, d)
    return [set(row[row >= 0]) for row in lists[0, :, 0]], scores[0, :, 0]


def qsa(tokens):
    """Their lists, and ours with the scores, of groups; keys are ours from the raw ones on, but for the norm."""
    config = qwen.Qwen4ExpTextConfig(hidden_size=WIDTH, indexer_n_heads=HEADS, indexer_kv_heads=1, indexer_head_dim=DIM,
                                     head_dim=DIM, indexer_budget=COUNT * GROUP, indexer_compress_ratio=GROUP)
    indexer, hidden = qwen.Qwen4ExpTextQSAIndexer(config, 0), torch.randn(1, tokens, WIDTH)
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.cat([angles, angles], -1)[None]
    cos, sin, causal = angles.cos(), angles.sin(), torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    mask = indexer(hidden, (cos, sin), causal, None)[0, 0]
    theirs = [set((row.nonzero().flatten() // GROUP).tolist()) for row in mask]
    whole = [set(row.nonzero().flatten().tolist()) for row in mask]
    for t, (groups, read) in enumerate(zip(theirs, whole)):
        if any(s <= t and s not in read for group in groups for s in range(group * GROUP, (group + 1) * GROUP)):
            sys.exit(f"family: query {t} of {tokens}: transformers reads a part of a group")
    projected = indexer.index_qk_proj(hidden).reshape(1, tokens, HEADS + 1, DIM)
    q = qwen.apply_rotary_pos_emb(indexer.q_layernorm(projected[:, :, :HEADS]), cos=cos, sin=sin, unsqueeze_dim=2)
    keys = tokens // GROUP
    k = np.zeros((1, keys, 1, DIM), np.float32)
    groups = nsa.desc(1, tokens, 1, 1, DIM, cmp_block=GROUP, cmp_stride=GROUP, slc_block=GROUP)
    nsa.compress_forward(nsa.Compress(dim=DIM, x=projected[:, :, HEADS:].contiguous().numpy(), out=k), groups)
    k = np.ascontiguousarray(indexer.k_layernorm(torch.from_numpy(k)).numpy())
    positions = (np.arange(keys, dtype=np.int32) * GROUP).reshape(1, keys)
    nsa.rope_forward(nsa.Rope(x=k, out=k, heads=1, dim=DIM, pairs=nsa.RopePairs.HALVES, positions=positions),
                     nsa.desc(1, keys, 1, 1, DIM))
    return theirs, *our_lists(q.contiguous().numpy(), k, tokens, tail=1)


def csa(tokens):
    """The same of CSA, of the queries, keys and weights that their scorer is given."""
    config = deepseek.DeepseekV4Config(hidden_size=WIDTH, index_n_heads=HEADS, index_head_dim=DIM, index_topk=COUNT,
                                       q_lora_rank=32, head_dim=64)
    indexer, hidden = deepseek.DeepseekV4Indexer(config), torch.randn(1, tokens, WIDTH)
    torch.nn.init.normal_(indexer.position_bias)
    given = []
    indexer.scorer.register_forward_pre_hook(lambda module, arguments: given.extend(arguments))
    theirs = indexer(hidden, torch.randn(1, tokens, 32), torch.arange(tokens)[None], None, 0)[0]
    q, k = given[0].contiguous().numpy(), given[1][:, :, None].contiguous().numpy()
    weights = indexer.scorer.weights_proj(hidden).contiguous().numpy()
    return [set(row[row >= 0].tolist()) for row in theirs], *our_lists(q, k, tokens, weights)


def compare(name, lists):
    read, ties = 0, 0
    for tokens in (1, 3, 64, 199, 403):
        theirs, ours, scores = lists(tokens)
        for t in range(tokens):
            least = min((scores[t, group] for group in ours[t] if group < (t + 1) // GROUP), default=0)
            differ = ours[t] ^ theirs[t]
            if any(abs(scores[t, group] - least) > 1e-5 * max(1, abs(least)) for group in differ):
                sys.exit(f"family: {name}: query {t} of {tokens}: one of both alone reads {sorted(differ)}")
            ties += bool(differ)
            read += 1
    print(f"family: {name} of transformers {transformers.__version__}: {read} lists, {ties} differ, in ties alone")


if __name__ == "__main__":
    torch.manual_seed(1)
    with torch.no_grad():
        compare("qsa", qsa)
        compare("csa", csa)
