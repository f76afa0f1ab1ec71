/* token_list.c - see token_list.h. */
#include "data/token_list.h"

#include <stdlib.h>

bool token_list_push(token_list *list, int32_t id) {
    if (list->count == list->room) {
        size_t room = list->room ? list->room * 2 : 1024;
        int32_t *more = realloc(list->ids, room * sizeof *more);
        if (!more) return false;
        list->ids = more;
        list->room = room;
    }
    list->ids[list->count++] = id;
    return true;
}

void token_list_free(token_list *list) {
    token_list empty = {NULL, 0, 0};
    free(list->ids);
    *list = empty;
}
