/* train_open.c - what a run stands on: tokenizer, checkpoint, telemetry, model, data. Twin:
   train_inside.h. The order matters: whatever can be refused is refused before out_dir is
   touched. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/threads.h"
#include "train/restore.h"
#include "train/sample.h"
#include "train/train_inside.h"

model_config train_model_config(const config *c, int vocab) {
    static const nsa_rope_scaling scalings[] = {NSA_ROPE_SCALING_NONE, NSA_ROPE_SCALING_LINEAR,
                                                NSA_ROPE_SCALING_NTK, NSA_ROPE_SCALING_YARN,
                                                NSA_ROPE_SCALING_LLAMA3};
    const config_model *m = &c->model;
    if (m->vocab_size) vocab = (int)m->vocab_size;
    model_config x = tinylm(vocab, (int)m->dim, (int)m->n_layers, (int)m->n_heads,
                            (int)m->n_kv_groups, (int)m->d_k, (int)m->d_v, (int)c->nsa.l,
                            (int)c->nsa.d, (int)c->nsa.l_sel, (int)c->nsa.n_sel, (int)c->nsa.w);
    for (int64_t i = 0; i < m->n_layers; i++)
        x.attention[i] = (unsigned char)config_attention(m, i);
    x.tied = m->tied_embeddings;
    x.qk_norm = m->qk_norm;
    x.phi = (nsa_phi)c->nsa.phi;
    x.gate = (nsa_gate_kind)c->nsa.gate;
    x.shared_kv = m->shared_kv;
    x.gate_linear = c->nsa.gate_form == CONFIG_GATE_LINEAR;
    x.swiglu = m->mlp == CONFIG_SWIGLU;
    if (m->mlp_hidden) x.hidden = (int)m->mlp_hidden;
    x.slc_init = (int)c->nsa.n_init;
    x.slc_local = (int)c->nsa.n_local;
    x.norm_eps = m->norm_eps;
    x.rope_base = m->rope_base;
    x.rope_factor = m->rope_factor;
    x.rope_pairs = (nsa_rope_pairs)m->rope_pairs;
    x.rope_scaling = scalings[m->rope_scaling];
    x.rope_fast = m->rope_fast;
    x.rope_slow = m->rope_slow;
    x.rope_trained_context = (int)m->rope_trained_context;
    return x;
}

/* --resume alone, in the folder of a run that ended before its first checkpoint: nothing is lost by
   beginning again, and whoever starts a run again and again need not know when that was. */
static bool begins_again(const config *c) {
    const char *folder = c->train.out_dir;
    return !strcmp(c->train.resume, "latest") && files_exist(folder) && !checkpoint_exists(folder);
}

/* Of a run that goes on, else the weights that a new one begins with. */
static const char *kept_path(const config *c) {
    if (!c->train.resume[0]) return c->train.init_from;
    return strcmp(c->train.resume, "latest") ? c->train.resume : c->train.out_dir;
}

bool train_recall(const config *asked, config *kept, fault *f) {
    checkpoint k;
    if (begins_again(asked)) return true;
    if (!checkpoint_open(&k, kept_path(asked), f)) return false;
    *kept = k.config;
    checkpoint_close(&k);
    return true;
}

/* Moments of one optimizer mean nothing to another. */
static bool same_optimizer(const config *c, const config *kept, fault *f) {
    static const char *const names[] = {"adamw", "muon"};
    int64_t here = c->train.optimizer, there = kept->train.optimizer;
    return here == there ||
           fault_set(f,
                     "train.optimizer is %s here and %s in the checkpoint, whose moments it could "
                     "not use; --init-from takes the weights alone",
                     names[here], names[there]);
}

/* A resumed run must be the same model under the same optimizer; all else may change, and its data
   goes on where it was. */
static bool open_checkpoint(checkpoint *k, const config *c, fault *f) {
    if (!checkpoint_open(k, kept_path(c), f)) return false;
    fault why;
    bool ok = (config_same_model(c, &k->config, &why) && same_optimizer(c, &k->config, &why)) ||
              fault_set(f, "%.400s: %s", k->path, why.text);
    if (ok && !config_recalled(c, &k->config, &why))
        ok = fault_set(f,
                       "%.400s: saved by another run while this one was starting: %s; start again",
                       k->path, why.text);
    if (ok && k->state.step > c->train.steps)
        ok = fault_set(f, "train.steps = %lld, but %.400s is after step %lld already",
                       (long long)c->train.steps, k->path, (long long)k->state.step);
    if (!ok) checkpoint_close(k);
    return ok;
}

static bool open_telemetry(trainer *t, fault *f) {
    const config *c = t->config;
    telemetry_options options = {.config = c,
                                 .device = t->o->name,
                                 .dtype = train_dtype_name(t->o->dtype),
                                 .rank = t->dist->rank,
                                 .world = t->dist->world,
                                 .resumed = c->train.resume[0] != 0,
                                 .resume_step = t->state.step,
                                 .loss_first = t->state.loss_first,
                                 .seconds = t->state.seconds,
                                 .tokens = t->state.tokens,
                                 .held = t->held,
                                 .log = stdout};
    t->held = 0;
    t->telemetry = telemetry_open(&options, f);
    return t->telemetry != NULL;
}

void train_note_loader(const trainer *t, const char *what) {
    int64_t set = t->config->data.dataset;
    char msg[64];
    fault unused;
    snprintf(msg, sizeof msg, "fineweb_loader_%s", what);
    if (set == CONFIG_FINEWEB || set == CONFIG_FINEWEB_LOCAL)
        (void)telemetry_note(t->telemetry, msg, &unused);
}

data_options train_data_options(const config *c, tokenizer *t, int64_t vocab, const dist *d) {
    data_options options = {.config = &c->data,
                            .tokenizer = t,
                            .vocab_size = vocab,
                            .seq_len = c->train.seq_len,
                            .batch_size = c->train.batch_size,
                            .seed = (uint64_t)c->train.seed,
                            .rank = dist_group(d),
                            .world = dist_groups(d),
                            .processes = d->world,
                            .val_batches = c->train.eval_batches};
    return options;
}

static bool open_data(trainer *t, const checkpoint *k, fault *f) {
    data_options options =
        train_data_options(t->config, t->tokenizer, t->model.config.vocab, t->dist);
    options.resume = k ? &t->state.data : NULL;
    options.other_fraction = k && k->config.data.val_fraction != t->config->data.val_fraction;
    options.stop = t->dist->world == 1 ? signals_stop_requested : NULL;
    options.notes = telemetry_listener(t->telemetry);
    train_note_loader(t, "warmup");
    t->data = data_open(&options, f);
    train_note_loader(t, t->data ? "ready" : "error");
    if (t->data) telemetry_say(t->telemetry, "data: %s", data_describe(t->data));
    return t->data != NULL;
}

model_options train_model_options(const config *c, dist *d) {
    model_options options = {.batch = (int)c->train.batch_size / dist_groups(d),
                             .tokens = (int)c->train.seq_len,
                             .training = true,
                             .muon = c->train.optimizer == CONFIG_MUON,
                             .dist = d};
    options.graphs = c->runtime.cuda_graph && dist_on_stream(d) && !c->data.isolate_documents &&
                     !c->telemetry.trace_module_bwd;
    option_layers gc = option_layers_of(c->runtime.gradient_checkpointing);
    options.checkpointing = gc.kind == OPTION_LAYERS_SELECTIVE ? CHECKPOINT_SELECTIVE
                            : gc.kind == OPTION_LAYERS_NONE    ? CHECKPOINT_NONE
                                                               : CHECKPOINT_LAYERS;
    if (gc.kind == OPTION_LAYERS_RANGE) options.first = gc.first, options.end = gc.last + 1;
    return options;
}

/* --init-from: a new run on weights that are there. */
static bool load_first_weights(trainer *t, fault *f) {
    checkpoint k;
    fault why;
    if (!checkpoint_open(&k, t->config->train.init_from, f)) return false;
    bool ok = config_same_model(t->config, &k.config, &why) ||
              fault_set(f, "train.init_from: %.400s: %s", k.path, why.text);
    ok = ok && restore_same_vocabulary(&k, t->tokenizer, t->config->data.tokenizer_path, f) &&
         train_load_weights(t, &k, f);
    checkpoint_close(&k);
    return ok;
}

static bool open_weights(trainer *t, const checkpoint *k, fault *f) {
    if (k) return train_load(t, k, f);
    return !t->config->train.init_from[0] || load_first_weights(t, f);
}

static bool open_model(trainer *t, const checkpoint *k, fault *f) {
    const config *c = t->config;
    model_config m = train_model_config(c, tokenizer_vocab_size(t->tokenizer));
    model_options options = train_model_options(c, t->dist);
    model *x = &t->model;
    return restore_fits(&m, &options, t->o, f) &&
           model_open(x, &m, &options, t->o, (uint64_t)c->train.seed, f) &&
           dist_attach(t->dist, t->o, x->params.value, x->params.grad, x->params.elements, f) &&
           train_describe_tensors(t, f) && open_weights(t, k, f) &&
           (c->sample.length == 0 || /* tokens that come as numbers need no vocabulary's files */
            sample_prompt(t->tokenizer, c->sample.prompt, strlen(c->sample.prompt), m.vocab,
                          &t->prompt, f));
}

static void open_traces(trainer *t) {
    const config_telemetry *c = &t->config->telemetry;
    if (c->trace_module_bwd) t->observer.trace = telemetry_listener(t->telemetry);
    if (c->trace_grads && t->dist->world > 1)
        telemetry_say(t->telemetry,
                      "telemetry.trace_grads: no effect: no process has all of a gradient's sum");
}

static void say_processes(const trainer *t) {
    const dist *d = t->dist;
    const config_train *c = &t->config->train;
    char share[128];
    long long rows = c->batch_size / dist_groups(d);
    if (d->context == 1)
        snprintf(share, sizeof share, "%lld rows each", rows);
    else
        snprintf(share, sizeof share, "%lld rows for each %d, and of a row %lld tokens each", rows,
                 d->context, (long long)(c->seq_len / d->context));
    telemetry_say(t->telemetry, "processes: %d over %s, %s, gradients in %d buckets of %.1f MiB%s",
                  d->world, d->link->name, share, d->buckets,
                  (double)d->bucket * (double)sizeof(real) / (1 << 20),
                  d->compress ? ", as bf16" : "");
}

static void say_what_runs(trainer *t, const checkpoint *k) {
    const model *m = &t->model;
    const config_train *c = &t->config->train;
    telemetry_say(t->telemetry,
                  "model: %lld parameters, %d layers, attention %.100s, %.0f MiB | %s, %s, %d "
                  "threads, %s%s%s",
                  (long long)m->params.count, m->config.n_layers, t->config->model.attention,
                  (double)m->arena.used / (1 << 20), t->o->name, train_dtype_name(t->o->dtype),
                  t->o->threads, t->o->library, t->o->missing ? ": " : "",
                  t->o->missing ? t->o->missing : "");
    if (t->o->speed)
        telemetry_say(t->telemetry, "runtime.precision: linear maps of %s are %s",
                      train_dtype_name(t->o->dtype), t->o->speed);
    if (t->config->runtime.cuda_graph && (!t->o->graph_begin || !m->options.graphs))
        telemetry_say(t->telemetry,
                      "runtime.cuda_graph: no effect: it needs a GPU, one process or NCCL, "
                      "documents that are not isolated, and no trace of backward or buckets");
    if (t->dist->link) say_processes(t);
    if (k)
        telemetry_say(t->telemetry, "resumed after step %lld of %lld, from %s%s",
                      (long long)t->state.step, (long long)c->steps, k->path,
                      t->state.step < c->steps
                          ? ""
                          : "; all steps are done: none is left to train (--steps N for more)");
    else if (c->resume[0])
        telemetry_say(t->telemetry, "resumed before the first checkpoint: from step 1 on");
    if (k && train_other_attention(t, k)) train_say_attention(t, &k->config.model);
    if (c->init_from[0])
        telemetry_say(t->telemetry,
                      k ? "train.init_from: no effect: the run goes on from its own "
                          "checkpoint; %s is not read"
                        : "weights from %s",
                      c->init_from);
}

nsa_dtype train_dtype(const config *c) {
    static const nsa_dtype dtypes[] = {NSA_F32, NSA_BF16, NSA_F16}; /* CONFIG_FP32 and so on */
    return dtypes[c->runtime.precision];
}

bool train_open_cpu(ops *o, const config *c, fault *f) {
    bool asked = config_from(c, "runtime.precision") == CONFIG_FROM_COMMAND_LINE;
    if (!ops_cpu_open(o, threads_granted((int)c->runtime.threads), f)) return false;
    if (asked && c->runtime.precision != CONFIG_FP32) ops_cpu_narrow(o, train_dtype(c));
    return true;
}

/* The device and the precision that this back end has; a file made for a GPU says what to do. */
static bool settle_device(const config *c, const ops *o, const dist *d, fault *f) {
    if (c->runtime.device == CONFIG_CUDA && strcmp(o->name, "cuda"))
        return fault_set(f,
                         "runtime.device: cuda, but this program runs on the %s; "
                         "add --device cpu to train here",
                         o->name);
    if (o->dtype != NSA_F32 || c->runtime.precision == CONFIG_FP32 || d->rank) return true;
    const char *name = c->runtime.precision == CONFIG_BF16 ? "bf16" : "fp16";
    fprintf(stderr, "runtime.precision: %s asked for, the %s computes in fp32\n", name, o->name);
    return true;
}

/* The team was capped when the back end was opened. */
static void warn_of_threads(const config *c, const ops *o, const dist *d) {
    int asked = threads_asked((int)c->runtime.threads);
    if (!o->host_memory || d->rank || asked <= o->threads) return;
    fprintf(stderr,
            "runtime.threads: %d asked for, %d used: this process may use %d processor%s "
            "(affinity, CPU quota)\n",
            asked, o->threads, o->threads, o->threads == 1 ? "" : "s");
}

/* Small gradients would vanish in f16, so there the loss is scaled. A run that goes on keeps its
   scale. */
static void settle_scale(trainer *t) {
    static const double first = 65536;
    if (t->o->dtype != NSA_F16)
        t->state.loss_scale = 1;
    else if (t->state.loss_scale == 1)
        t->state.loss_scale = first;
}

/* All that needs no other process; *k: the checkpoint that the run goes on from, or NULL. */
static bool open_own(trainer *t, checkpoint *opened, checkpoint **k, fault *f) {
    const config *c = t->config;
    *k = NULL;
    if (!settle_device(c, t->o, t->dist, f)) return false;
    warn_of_threads(c, t->o, t->dist);
    t->tokenizer = tokenizer_open(c->data.tokenizer, c->data.tokenizer_path, f);
    if (!t->tokenizer) return false;
    if (c->train.resume[0] && !begins_again(c)) {
        if (!open_checkpoint(opened, c, f)) return false;
        *k = opened;
        t->state = opened->state;
        if (!restore_same_vocabulary(opened, t->tokenizer, c->data.tokenizer_path, f)) return false;
        t->saved_step = opened->state.step;
    }
    t->first_step = t->state.step + 1;
    restore_note_vocabulary(&t->state, t->tokenizer, c->model.vocab_size);
    settle_scale(t);
    t->observer.statistics = !telemetry_without_stats(c);
    if (!open_model(t, *k, f) || !train_open_saver(t, f)) return false;
    loss_scaler scaler = {t->state.loss_scale, t->state.scaler_good_steps, t->state.skipped_steps};
    model_set_scaler(&t->model, &scaler);
    return true;
}

/* Whether the final weights can be written is known before the first step, not after the last. They
   may go to the run's own folder, which is there by now. */
static bool check_save(const char *path, fault *f) {
    fault why;
    return !path[0] || files_may_write(path, &why) || fault_set(f, "train.save: %s", why.text);
}

/* No process looks for the checkpoint before rank 0 has the folder: a run that is still there may
   save once more. */
static bool hold_folder(trainer *t, fault *f) {
    const config *c = t->config;
    fault lost;
    int rank;
    if (!c->train.resume[0]) return true;
    if (!t->dist->rank && files_exist(c->train.out_dir)) t->held = telemetry_hold(c, f);
    int64_t failed = t->held < 0;
    if (failed) t->held = 0;
    if (!dist_largest(t->dist, &failed, &rank, failed ? &lost : f)) return false;
    t->follows = failed && t->dist->rank;
    return !failed || (t->follows ? fault_set(f, "rank %d cannot start", rank) : false);
}

/* Rank 0 makes the folder, or finds it used, before the others write their heartbeats there. */
static bool open_in_turn(trainer *t, bool ok, fault *f) {
    int rank;
    fault lost;
    if (ok && t->dist->rank == 0) ok = open_telemetry(t, f) && check_save(t->config->train.save, f);
    int64_t failed = !ok;
    if (!dist_largest(t->dist, &failed, &rank, ok ? f : &lost)) return false;
    t->follows = failed && ok;
    if (failed) return t->follows ? fault_set(f, "rank %d cannot start", rank) : false;
    return t->dist->rank == 0 || open_telemetry(t, f);
}

/* What the run goes on from is now the newest on the disk, with the settings of this start: a kill
   before the next checkpoint loses neither. Every process has read it by now. */
static bool adopt(trainer *t, const checkpoint *k, fault *f) {
    const config *c = t->config;
    listener notes = telemetry_listener(t->telemetry);
    if (t->dist->rank || !k) return true;
    if (!(train_other_attention(t, k) ? train_save_carried(t, k, f)
                                      : checkpoint_adopt(k, c->train.out_dir, c, f)))
        return false;
    return !strcmp(c->train.resume, "latest") ||
           checkpoint_leave_later(c->train.out_dir, k->state.step, &notes, f);
}

bool train_open(trainer *t, const config *c, const ops *o, dist *d, fault *f) {
    checkpoint opened, *k = NULL;
    memset(t, 0, sizeof *t);
    t->config = c;
    observer_wrap(&t->observer, o, &t->model);
    t->o = &t->observer.table;
    t->dist = d;
    t->saved_step = -1;
    t->state.seed = (uint64_t)c->train.seed;
    t->state.val_loss = (double)NAN;
    t->state.loss_scale = 1;
    if (!train_same_settings(c, d, f) || !dist_divide(d, d->context, f) || !hold_folder(t, f))
        return false;
    bool ok = signals_begin(f) && open_own(t, &opened, &k, f);
    ok = open_in_turn(t, ok, f);
    if (ok) {
        open_traces(t);
        say_what_runs(t, k);
        train_note_memory(t);
    }
    ok = ok && adopt(t, k, f) && telemetry_go_on(t->telemetry, f) &&
         (d->rank || train_report_start(t, k, f)) && telemetry_note(t->telemetry, "boot", f) &&
         open_data(t, k, f);
    if (k) checkpoint_close(k);
    return ok;
}

void train_close(trainer *t) {
    data_close(t->data);
    dist_detach(t->dist);
    saver_close(t->saver);
    if (t->held) close(t->held);
    model_close(&t->model);
    token_list_free(&t->prompt);
    tokenizer_close(t->tokenizer);
    free(t->tensors.weights);
    free(t->tensors.moments);
    free(t->tensors.names);
    free(t->copy);
    free(t->moments);
}
