"""q k^T of decode rows in PyTorch, in two ways; knows nothing of softmax, values or lengths.

Unit: one bucket of rows, all padded to `width` tokens. Which way depends on how keys are stored:
summed where they lie, or gathered into a buffer that stays in a core's cache and multiplied there.
"""

import torch

from syncline.model_ops_rocm.reference.geometry import keys_are_d_major, stored_keys

# Per thread: half of a common 1 MiB second-level cache, for keys that are read back at once.
_GATHER_BYTES = 512 * 1024


def summed_scores(
    q_RND: torch.Tensor, k_cache: torch.Tensor, key_index: torch.Tensor, bag_starts: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, N, width] from float32 keys stored [NB, K, D, BS].

    The BS scores of a block are the sum over d of q[d] times the block's row d: one bag of D rows
    of the storage per (row, head, block), in the order of `key_index`.
    """
    num_rows, num_heads, head_dim = q_RND.shape
    block_size = k_cache.shape[2]
    num_blocks = key_index.shape[0] // (num_rows * num_heads * head_dim)
    q_weights = q_RND.unsqueeze(2).expand(num_rows, num_heads, num_blocks, head_dim)
    sums = torch.embedding_bag(
        stored_keys(k_cache).view(-1, block_size),
        key_index,
        bag_starts,
        per_sample_weights=q_weights.reshape(-1),
    )[0]
    return sums.view(num_rows, num_heads, num_blocks * block_size)


def gathered_scores(
    q_RND: torch.Tensor, k_cache: torch.Tensor, pair_index: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, N, width] from keys of any dtype and order; index [rows, K * blocks]."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    num_rows, num_heads, _ = q_RND.shape
    num_pairs = pair_index.shape[1]
    width = num_pairs // num_kv_heads * block_size
    row_bytes = num_pairs * block_size * head_dim * 4
    chunk = max(1, _GATHER_BYTES * torch.get_num_threads() // row_bytes)
    cached = stored_keys(k_cache).view(-1, block_size * head_dim)
    gathered = torch.empty(
        (min(chunk, num_rows) * num_pairs, block_size * head_dim),
        dtype=k_cache.dtype,
        device=k_cache.device,
    )
    group_size = num_heads // num_kv_heads
    queries = q_RND.view(num_rows * num_kv_heads, group_size, head_dim)
    scores = torch.empty((num_rows * num_kv_heads, group_size, width), device=k_cache.device)
    for start in range(0, num_rows, chunk):
        stop = min(start + chunk, num_rows)
        part = gathered[: (stop - start) * num_pairs]
        torch.index_select(cached, 0, pair_index[start:stop].view(-1), out=part)
        heads = slice(start * num_kv_heads, stop * num_kv_heads)
        num_heads_here = (stop - start) * num_kv_heads
        if keys_are_d_major(k_cache):
            blocks = part.view(num_heads_here, -1, head_dim, block_size).float()
            keys_DT = blocks.transpose(1, 2).reshape(num_heads_here, head_dim, width)
        else:
            keys_DT = part.view(num_heads_here, width, head_dim).float().transpose(1, 2)
        torch.bmm(queries[heads], keys_DT, out=scores[heads])
    return scores.view(num_rows, num_heads, width)
