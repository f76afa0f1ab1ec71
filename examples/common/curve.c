/* curve.c - see curve.h. Where there are more steps than columns of the picture, a column shows the
   mean of its steps as a line and their range as a band. */
#include "curve.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csv.h"
#include "files.h"

enum { WIDTH = 800, HEIGHT = 450, LEFT = 60, RIGHT = 20, TOP = 30, BOTTOM = 45 };
enum { COLUMNS = WIDTH - LEFT - RIGHT };

typedef struct series {
    double *step, *loss;
    size_t count, room;
} series;

typedef struct axes {
    double step_min, step_max, loss_min, loss_max;
} axes;

/* ---- Reading ---- */

static void free_series(series *s) {
    free(s->step);
    free(s->loss);
}

/* A step and its loss; a loss that is no number is left out. */
static void add_point(void *user, const double *values) {
    series *s = user;
    if (!isfinite(values[1])) return;
    if (s->count == s->room) {
        size_t room = s->room ? s->room * 2 : 1024;
        double *step = realloc(s->step, room * sizeof *step);
        if (step) s->step = step;
        double *loss = step ? realloc(s->loss, room * sizeof *loss) : NULL;
        if (!loss) return; /* the picture then ends here */
        s->loss = loss;
        s->room = room;
    }
    s->step[s->count] = values[0];
    s->loss[s->count++] = values[1];
}

static void widen(axes *a, const series *s) {
    for (size_t i = 0; i < s->count; i++) {
        a->step_min = fmin(a->step_min, s->step[i]);
        a->step_max = fmax(a->step_max, s->step[i]);
        a->loss_min = fmin(a->loss_min, s->loss[i]);
        a->loss_max = fmax(a->loss_max, s->loss[i]);
    }
}

/* ---- Drawing ---- */

static double x_of(const axes *a, double step) {
    double span = a->step_max - a->step_min;
    return LEFT + (span > 0 ? (step - a->step_min) / span : 0.5) * COLUMNS;
}

static double y_of(const axes *a, double loss) {
    double span = a->loss_max - a->loss_min;
    return TOP + (span > 0 ? (a->loss_max - loss) / span : 0.5) * (HEIGHT - TOP - BOTTOM);
}

/* 1, 2 or 5 times a power of ten: at most `most` of them in the span. */
static double tick_distance(double span, int most) {
    static const double factors[] = {2, 2.5, 2};
    double distance = pow(10, floor(log10(span / most)));
    for (int i = 0; span / distance > most; i++) distance *= factors[i % 3];
    return distance;
}

static void draw_ticks(FILE *out, const axes *a, bool is_step) {
    double from = is_step ? a->step_min : a->loss_min, to = is_step ? a->step_max : a->loss_max;
    if (to <= from) return;
    double distance = tick_distance(to - from, is_step ? 10 : 8);
    if (is_step) distance = fmax(distance, 1);
    for (double n = ceil(from / distance); n * distance <= to; n++) {
        double value = n * distance;
        if (is_step)
            fprintf(out,
                    "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.0f</text>\n"
                    "<path class=\"grid\" d=\"M%.1f %dV%d\"/>\n",
                    x_of(a, value), HEIGHT - BOTTOM + 18, value, x_of(a, value), TOP,
                    HEIGHT - BOTTOM);
        else
            fprintf(out,
                    "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.6g</text>\n"
                    "<path class=\"grid\" d=\"M%d %.1fH%d\"/>\n",
                    LEFT - 6, y_of(a, value) + 4, value, LEFT, y_of(a, value), WIDTH - RIGHT);
    }
}

/* The steps that fall into one column: where they end, their mean, least and most. */
static size_t column_of(const axes *a, const series *s, size_t begin, double *mean,
                        double range[2]) {
    double column = floor(x_of(a, s->step[begin])), sum = 0;
    size_t end = begin;
    range[0] = range[1] = s->loss[begin];
    for (; end < s->count && floor(x_of(a, s->step[end])) == column; end++) {
        sum += s->loss[end];
        range[0] = fmin(range[0], s->loss[end]);
        range[1] = fmax(range[1], s->loss[end]);
    }
    *mean = sum / (double)(end - begin);
    return end;
}

static void draw_training(FILE *out, const axes *a, const series *s) {
    double mean, range[2];
    fprintf(out, "<path class=\"range\" d=\"");
    for (size_t i = 0; i < s->count;) {
        double x = x_of(a, s->step[i]);
        i = column_of(a, s, i, &mean, range);
        fprintf(out, "M%.1f %.1fV%.1f", x, y_of(a, range[1]), y_of(a, range[0]));
    }
    fprintf(out, "\"/>\n<polyline class=\"training\" points=\"");
    for (size_t i = 0; i < s->count;) {
        double x = x_of(a, s->step[i]);
        i = column_of(a, s, i, &mean, range);
        fprintf(out, "%.1f,%.1f ", x, y_of(a, mean));
    }
    fprintf(out, "\"/>\n");
}

static void draw_validation(FILE *out, const axes *a, const series *s) {
    if (!s->count) return;
    fprintf(out, "<polyline class=\"validation\" points=\"");
    for (size_t i = 0; i < s->count; i++)
        fprintf(out, "%.1f,%.1f ", x_of(a, s->step[i]), y_of(a, s->loss[i]));
    fprintf(out, "\"/>\n");
    for (size_t i = 0; i < s->count; i++)
        fprintf(out, "<circle class=\"validation\" r=\"2.5\" cx=\"%.1f\" cy=\"%.1f\"/>\n",
                x_of(a, s->step[i]), y_of(a, s->loss[i]));
}

static void draw(FILE *out, const axes *a, const series *training, const series *validation) {
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\">\n<style>\n"
            "text { font: 12px sans-serif; fill: #444 } path, polyline { fill: none }\n"
            ".grid { stroke: #ddd } .range { stroke: #b7d0ea }\n"
            ".training { stroke: #1f5fa8; stroke-width: 1.5 }\n"
            "polyline.validation { stroke: #c0501e; stroke-width: 1.5 }\n"
            "circle.validation { fill: #c0501e }\n</style>\n"
            "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT);
    draw_ticks(out, a, true);
    draw_ticks(out, a, false);
    draw_training(out, a, training);
    draw_validation(out, a, validation);
    fprintf(out, "<text x=\"%d\" y=\"18\">loss, nats per token: training to step %.0f, last %.4f",
            LEFT, a->step_max, training->loss[training->count - 1]);
    if (validation->count)
        fprintf(out, "; validation (dots), last %.4f", validation->loss[validation->count - 1]);
    fprintf(out, "</text>\n<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">step</text>\n</svg>\n",
            LEFT + COLUMNS / 2, HEIGHT - 8);
}

bool curve_write(const char *folder, fault *f) {
    axes a = {INFINITY, -INFINITY, INFINITY, -INFINITY};
    series training = {0}, validation = {0};
    char path[1280], *text = NULL;
    size_t bytes;
    bool ok = csv_read(folder, "training.csv", 2, add_point, &training, f) &&
              csv_read(folder, "val.csv", 2, add_point, &validation, f) &&
              files_join(path, sizeof path, folder, "loss.svg", f);
    if (ok && training.count) {
        widen(&a, &training);
        widen(&a, &validation);
        FILE *out = open_memstream(&text, &bytes);
        if (out) draw(out, &a, &training, &validation);
        ok = out && !fclose(out) ? files_replace(path, text, bytes, f)
                                 : fault_set(f, "%s: out of memory", path);
    }
    free(text);
    free_series(&training);
    free_series(&validation);
    return ok;
}
