/* token_list.h - a growing list of tokens. Twin: token_list.c. What a token means is the
   tokenizer's. */
#ifndef TOKEN_LIST_H
#define TOKEN_LIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Start from {0}, end with token_list_free. */
typedef struct token_list {
    int32_t *ids;
    size_t count, room;
} token_list;

bool token_list_push(token_list *list, int32_t id); /* false: out of memory */
void token_list_free(token_list *list);

#endif
