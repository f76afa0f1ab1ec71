/* attend_gather.cuh: over listed blocks for few heads, queries gathered by block; forward's calls.
   Twin: nsa.h, nsa__walk: the readers of each tile.
   Not here: the kernel that multiplies (attend.cuh), lists turned round (attend_readers.cuh).

   A tile of 128 rows has 128 / G neighbouring queries. Where G is small their lists have many
   blocks in all, each of which few of the tile's rows read; so there a tile has the readers of
   one block instead, and all of its rows multiply. What a query finds in a block goes to memory,
   and is added up in the order of the query's list, so its bits depend on itself alone. Queries
   are taken in chunks that keep that memory below NSA__GATHER_BYTES. */
#ifndef NSA_ATTEND_GATHER_CUH
#define NSA_ATTEND_GATHER_CUH

#include "attend_readers.cuh"

/* Tests define it small. */
#ifndef NSA__GATHER_BYTES
#define NSA__GATHER_BYTES (512 << 20)
#endif
/* Of more heads, or in longer lists, neighbours' blocks are gathered by the query tile: what is
   found would be more to move than the blocks themselves (bench/gpu/predict.py). Tests define it
   small, so that short lists go either way. */
#ifndef NSA__GATHER_LIST
#define NSA__GATHER_LIST 64
#endif
enum { NSA__GATHER_HEADS = 4, NSA__GATHER_LEAST = 32, NSA__GATHER_WARPS = 8 };

static nsa_status nsa__cuda_gather(nsa__cuda_attend_job *job, int part, cudaStream_t stream) {
    nsa__cuda_plan_reader_parts(job, part);
    return nsa__cuda_invert_lists(job, stream);
}

/* The row of a warp that adds up. */
struct nsa__cuda_gather_row {
    int64_t number; /* of (B, count, H) */
    int64_t batch, row;
    int b, place, head, query;
    bool there;
    const int32_t *list;
};

NSA__DEVICE nsa__cuda_gather_row nsa__cuda_gather_row_of(const nsa__cuda_attend_job &job) {
    const nsa_desc &d = job.d;
    nsa__cuda_gather_row r;
    r.number =
        static_cast<int64_t>(blockIdx.x) * NSA__GATHER_WARPS + static_cast<int>(threadIdx.x) / 32;
    r.head = static_cast<int>(r.number % d.heads);
    r.place = static_cast<int>(r.number / d.heads % d.count);
    r.b = static_cast<int>(min(r.number / d.heads / d.count, static_cast<int64_t>(d.batch)));
    r.there = false;
    if (r.b == d.batch) return r;
    const nsa__sequence seq = nsa__sequence_of(d, r.b);
    r.there = r.place < seq.count;
    r.batch = seq.batch;
    r.row = seq.row + r.place;
    r.query = seq.first + r.place;
    r.list = nsa__row_of<const int32_t>(job.x.blocks, r.batch, r.row, r.head / job.group);
    return r;
}

/* The entries of the row's list that count, as nsa__cuda_walk_keys has it: the first from `slot`
   on, list_width if there is none. `before` is the last that counted. */
NSA__DEVICE int nsa__cuda_gather_next(const nsa__cuda_attend_job &job,
                                      const nsa__cuda_gather_row &row, int slot, int &before) {
    for (; slot < job.list_width; slot++)
        if (row.list[slot] > before && row.list[slot] <= row.query / job.d.slc_block) {
            before = row.list[slot];
            break;
        }
    return slot;
}

/* A warp adds up what one row has found: out and lse. */
static __global__ void nsa__cuda_gather_forward_kernel(nsa__cuda_attend_job job) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const nsa__cuda_gather_row row = nsa__cuda_gather_row_of(job);
    if (!row.there) return;
    const float2 *sums = job.found_sums + row.number * job.list_width;
    const float *found = job.found + row.number * job.list_width * job.d.dim_v;
    const float nan = __uint_as_float(0x7fc00000u), ln2 = 0.693147180559945f;
    float most = -INFINITY, sum = 0;
    int before = -1;
    bool bad = false;
    for (int i = nsa__cuda_gather_next(job, row, 0, before); i < job.list_width;
         i = nsa__cuda_gather_next(job, row, i + 1, before)) {
        const float now = fmaxf(most, sums[i].x);
        bad |= sums[i].x == INFINITY;
        sum = fmaf(sum, nsa__cuda_shrink(most, now), sums[i].y * nsa__cuda_shrink(sums[i].x, now));
        most = now;
    }
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    void *to = nsa__row_at(job.x.out, row.batch, row.row, row.head);
    for (int c = 4 * lane; c < job.d.dim_v; c += 128) {
        float out[4] = {};
        before = -1;
        for (int i = nsa__cuda_gather_next(job, row, 0, before); i < job.list_width && !bad;
             i = nsa__cuda_gather_next(job, row, i + 1, before)) {
            const float share = nsa__cuda_shrink(sums[i].x, most);
            const float4 x = nsa__cuda_float4_at(found + static_cast<int64_t>(i) * job.d.dim_v + c);
            out[0] = fmaf(x.x, share, out[0]);
            out[1] = fmaf(x.y, share, out[1]);
            out[2] = fmaf(x.z, share, out[2]);
            out[3] = fmaf(x.w, share, out[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) out[e] = bad ? nan : out[e] * inverse;
        nsa__store4(job.x.out.dtype, to, c, out);
    }
    if (lane == 0)
        *nsa__row_of<float>(job.x.lse, row.batch, row.row, row.head) =
            bad        ? nan
            : sum == 0 ? -INFINITY
                       : (most + nsa__log2(sum)) * ln2;
}

/* ---- Calls --------------------------------------------------------------------------------- */

/* How many queries are gathered at a time, if one finds `width` floats in a block; 0: they are
   not. */
static int nsa__cuda_gather_chunk(const nsa__cuda_attend_job *job, int width) {
    const nsa_desc *d = &job->d;
    if (job->branch != NSA__KEYS_SLC || job->group > NSA__GATHER_HEADS ||
        job->list_width > NSA__GATHER_LIST)
        return 0;
    const int64_t most = NSA__GATHER_BYTES /
                         (static_cast<int64_t>(d->batch) * d->heads * job->list_width * width * 4);
    if (most >= d->count || NSA__GATHER_LEAST >= d->count) return d->count;
    return most > NSA__GATHER_LEAST ? static_cast<int>(most) : NSA__GATHER_LEAST;
}

static void nsa__cuda_forward_plan(nsa__cuda_attend_job *job, const nsa_desc *d,
                                   nsa__cuda_branch_keys branch, nsa__cuda_arena *arena) {
    nsa__cuda_attend_plan(job, d, branch, arena);
    job->chunk = nsa__cuda_gather_chunk(job, d->dim_v + 2);
    if (!job->chunk) return;
    const int64_t found = static_cast<int64_t>(d->batch) * d->heads * job->list_width * job->chunk;
    nsa__cuda_plan_readers(job, job->chunk, arena);
    job->found = nsa__cuda_take<float>(arena, found * d->dim_v);
    job->found_sums = nsa__cuda_take<float2>(arena, found);
}

/* A view on the query's side without its first `rows` rows; none stays none. */
static nsa_tensor nsa__cuda_view_from(nsa_tensor x, int64_t rows) {
    const int64_t bytes = static_cast<int64_t>(nsa__dtype_bytes(x.dtype));
    if (x.data) x.data = static_cast<char *>(x.data) + rows * x.token * bytes;
    return x;
}

static nsa_attend nsa__cuda_queries_from(nsa_attend x, int64_t rows) {
    x.q = nsa__cuda_view_from(x.q, rows);
    x.out = nsa__cuda_view_from(x.out, rows);
    x.lse = nsa__cuda_view_from(x.lse, rows);
    x.blocks = nsa__cuda_view_from(x.blocks, rows);
    return x;
}

/* Chunk after chunk of queries: Run for the blocks, then `combine`, a warp to a row. */
template <template <typename, int, int> class Run>
static nsa_status nsa__cuda_gather_run(const nsa__cuda_attend_job *all,
                                       void (*combine)(nsa__cuda_attend_job), cudaStream_t stream) {
    const nsa_desc *d = &all->d;
    for (int64_t first = 0; first < d->count; first += all->chunk) {
        nsa__cuda_attend_job job = *all;
        dim3 grid;
        job.gathered = true;
        job.d.first = d->first + static_cast<int>(first);
        job.d.count = static_cast<int>(d->count - first);
        if (job.d.count > all->chunk) job.d.count = all->chunk;
        job.x = nsa__cuda_queries_from(all->x, first);
        job.dx = nsa__cuda_queries_from(all->dx, first);
        if (job.rows) job.rows += first * d->heads;
        nsa_status s = nsa__cuda_attend_choose<Run>(job, stream);
        if (s != NSA_OK) return s;
        const int64_t rows = static_cast<int64_t>(d->batch) * job.d.count * d->heads;
        s = nsa__cuda_grid(nsa__cuda_ceil_div(rows, NSA__GATHER_WARPS), &grid);
        if (s != NSA_OK) return s;
        s = nsa__cuda_status(
            NSA_LAUNCH(combine, grid, dim3(32 * NSA__GATHER_WARPS), 0, stream, job));
        if (s != NSA_OK) return s;
    }
    return NSA_OK;
}

static nsa_status nsa__cuda_attend_forward(const nsa_attend *x, const nsa_desc *d,
                                           nsa__cuda_branch_keys branch, void *workspace,
                                           size_t bytes, cudaStream_t stream) {
    nsa_status s = nsa__cuda_check_desc(d);
    if (s != NSA_OK) return s;
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    s = nsa__cuda_attend_check(x, d, branch, 1, &nsa__cuda_attend_names);
    if (s != NSA_OK) return s;
    nsa__cuda_attend_job job;
    s = nsa__cuda_attend_open(&job, d, branch, nsa__cuda_forward_plan, workspace, bytes);
    if (s != NSA_OK || d->count == 0) return s;
    job.x = *x;
    if ((s = nsa__cuda_attend_prepare(&job, stream)) != NSA_OK) return s;
    if (job.chunk)
        return nsa__cuda_gather_run<nsa__cuda_forward_run>(&job, nsa__cuda_gather_forward_kernel,
                                                           stream);
    return nsa__cuda_attend_choose<nsa__cuda_forward_run>(job, stream);
}

#endif
