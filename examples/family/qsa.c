/* qsa.c - Qwen's sparse attention (Qwen3.8; the model qwen4_exp of transformers): an index key is
   the RMS norm of the mean of four neighbouring raw keys, rotated to the first one's position. A
   group of four tokens that lies wholly at or before the query scores sum_h ReLU(q_h . k); the best
   groups are read, and besides them the tokens behind the last whole group. Nothing is forced.
   Twin: none; its definition, computed naively, stands below. */
#include "family.h"

enum { T = 199, H = 8, HK = 2, D = 32, INDEX_HEADS = 4, INDEX_DIM = 16, GROUP = 4, COUNT = 14 };
enum { KEYS = T / GROUP, BLOCKS = (T + GROUP - 1) / GROUP, LIST = COUNT + 1 };

/* Index queries (T, INDEX_HEADS, INDEX_DIM), normed and rotated as the model hands them over, and
   raw index keys (T, INDEX_DIM). */
typedef struct index_inputs {
    float *q, *raw;
} index_inputs;

static void rms_norm(float *rows, int n) {
    for (int i = 0; i < n; i++) {
        float *x = rows + i * INDEX_DIM, sum = 0;
        for (int c = 0; c < INDEX_DIM; c++) sum += x[c] * x[c];
        for (int c = 0; c < INDEX_DIM; c++) x[c] /= sqrtf(sum / INDEX_DIM + 1e-6f);
    }
}

/* Means, their norm, their rotation: positions are those of each group's first token. */
static void index_keys(const index_inputs *in, float *keys, int32_t *positions) {
    nsa_desc tokens = nsa_desc_default(1, T, 1, 1, INDEX_DIM), groups = tokens;
    tokens.cmp_block = tokens.cmp_stride = tokens.slc_block = GROUP;
    groups.tokens = groups.count = KEYS;
    nsa_compress mean = {0};
    mean.phi = NSA_PHI_MEAN, mean.dim = INDEX_DIM;
    mean.x = view(in->raw, T, 1, INDEX_DIM), mean.out = view(keys, KEYS, 1, INDEX_DIM);
    WITH_WORKSPACE(nsa_compress_forward_workspace_size(&mean, &tokens),
                   nsa_compress_forward(&mean, &tokens, workspace, bytes));
    rms_norm(keys, KEYS);
    nsa_rope rope = {0};
    for (int i = 0; i < KEYS; i++) positions[i] = i * GROUP;
    rope.x = rope.out = mean.out, rope.heads = 1, rope.dim = INDEX_DIM;
    rope.pairs = NSA_ROPE_HALVES;
    rope.positions = nsa_tensor_bthd(positions, NSA_I32, KEYS, 1, 1);
    demand(nsa_rope_forward(&rope, &groups));
}

/* One call scores whole groups and takes the tail besides, one attends, one goes back. */
static void with_nsa(const index_inputs *in, problem *p, int32_t *lists, float *scores) {
    float *keys = floats((size_t)KEYS * INDEX_DIM);
    int32_t *positions = (int32_t *)allocate(sizeof *positions * KEYS);
    nsa_desc by_index = nsa_desc_default(1, T, INDEX_HEADS, 1, INDEX_DIM);
    by_index.slc_block = GROUP, by_index.slc_count = COUNT;
    by_index.forced = NSA_FORCED_TAIL, by_index.slc_init = 0, by_index.slc_local = 1;
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.slc_block = GROUP, d.slc_count = LIST;
    index_keys(in, keys, positions);

    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_score score = {NSA_SCORE_RELU, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}, GROUP};
    score.q = view(in->q, T, INDEX_HEADS, INDEX_DIM), score.k = view(keys, KEYS, 1, INDEX_DIM);
    score.blocks = x.blocks = nsa_tensor_bthd(lists, NSA_I32, T, 1, LIST);
    score.scores = view(scores, T, 1, BLOCKS);
    x.blocks.head = 0; /* all heads share one list */
    WITH_WORKSPACE(nsa_score_blocks_workspace_size(&by_index),
                   nsa_score_blocks(&score, &by_index, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                   nsa_attend_slc_forward(&x, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&d),
                   nsa_attend_slc_backward(&dx, &x, &d, workspace, bytes));
    release(keys), release(positions);
}

/* ---- The definition ---- */

/* Index key b: mean, norm, rotation of the halves by position 4 b. */
static void key_naively(const float *raw, int b, double *key) {
    double square = 0, mean[INDEX_DIM];
    for (int c = 0; c < INDEX_DIM; c++) {
        mean[c] = 0;
        for (int s = 0; s < GROUP; s++) mean[c] += (double)raw[(b * GROUP + s) * INDEX_DIM + c];
        mean[c] /= GROUP;
        square += mean[c] * mean[c];
    }
    for (int c = 0; c < INDEX_DIM; c++) mean[c] /= sqrt(square / INDEX_DIM + 1e-6);
    for (int c = 0; c < INDEX_DIM / 2; c++) {
        double angle = GROUP * b * pow(10000.0, -2.0 * c / INDEX_DIM);
        double x = mean[c], y = mean[c + INDEX_DIM / 2];
        key[c] = x * cos(angle) - y * sin(angle);
        key[c + INDEX_DIM / 2] = x * sin(angle) + y * cos(angle);
    }
}

/* The scores of the whole groups that t sees, and whether its list holds the best of them, and the
   group that t is in the middle of, and nothing else. */
static int is_list_of(const float *q, const double *keys, int t, const int32_t *list,
                      double *scores) {
    int whole = (t + 1) / GROUP, tail = (t + 1) % GROUP != 0;
    int groups = whole < COUNT ? whole : COUNT, length = groups + tail, held = 0;
    for (int b = 0; b < BLOCKS; b++) scores[b] = -INFINITY;
    for (int b = 0; b < whole; b++) {
        scores[b] = 0;
        for (int h = 0; h < INDEX_HEADS; h++) {
            double product = 0;
            for (int c = 0; c < INDEX_DIM; c++)
                product += (double)q[h * INDEX_DIM + c] * keys[b * INDEX_DIM + c];
            scores[b] += product > 0 ? product : 0;
        }
    }
    while (held < LIST && list[held] >= 0) held++;
    return held == length && (!tail || list[length - 1] == whole) &&
           is_best(list, groups, scores, whole);
}

int main(void) {
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p);
    index_inputs in = {random_floats(11, (size_t)T * INDEX_HEADS * INDEX_DIM),
                       random_floats(12, (size_t)T * INDEX_DIM)};
    int32_t *lists = (int32_t *)allocate(sizeof *lists * T * LIST);
    float *scores = floats((size_t)T * BLOCKS);
    double *want = doubles((size_t)T * BLOCKS), *keys = doubles((size_t)KEYS * INDEX_DIM);
    int best = 1;
    printf("QSA\n");
    rms_norm(in.q, T * INDEX_HEADS);
    with_nsa(&in, &p, lists, scores);
    for (int b = 0; b < KEYS; b++) key_naively(in.raw, b, keys + b * INDEX_DIM);
    for (int t = 0; t < T; t++)
        best &= is_list_of(in.q + t * INDEX_HEADS * INDEX_DIM, keys, t, lists + t * LIST,
                           want + t * BLOCKS);
    compare("scores", scores, want, (size_t)T * BLOCKS);
    check(best, "every list holds the best whole groups and the tail");
    mask_of_lists(&p, lists, 1, LIST, GROUP);
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    release(in.q), release(in.raw), release(lists), release(scores), release(want), release(keys);
    return finish(&p, &r);
}
