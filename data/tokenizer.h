// tokenizer.h: text to token ids and back (GPT-2 byte-pair encoding), and the
// token shards that training reads.
//
// Header-only, C11 and C++20. Users of the tokenizer link with -lpcre2-8;
// users of the shards alone need no library.
#ifndef TOKENIZER_H
#define TOKENIZER_H

// POSIX calls (fsync, strdup, ...) are hidden under -std=c11 unless asked for.
#if defined(__STRICT_ANSI__) && !defined(_GNU_SOURCE) && !defined(_DEFAULT_SOURCE) && \
    !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

// A header of static functions: whoever includes it uses only some of them.
#define TOK_API static __attribute__((unused))

// -----------------------------------------------------------------------------
// Errors and memory: one line on stderr, then exit(1)

// Prints "WHO: message" and ends the program with status 1. A message names the
// thing at fault, what was found and what was expected.
__attribute__((format(printf, 2, 3), noreturn))
TOK_API void tok_fail(const char *who, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", who);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

// realloc of count elements of size bytes that never returns NULL.
TOK_API void *tok_realloc(void *old, int64_t count, size_t size) {
    if (count < 1) count = 1;
    void *p = NULL;
    if ((uint64_t)count <= SIZE_MAX / size) p = realloc(old, (size_t)count * size);
    if (!p) tok_fail("tokenizer", "out of memory for %lld elements of %zu bytes", (long long)count, size);
    return p;
}

// -----------------------------------------------------------------------------
// Token shards: 256 int32 of header, then one little-endian uint16 per token
//
// header[0] magic, [1] version, [2] number of tokens, [3] vocabulary size or 0
// where it is not known, the rest 0. This is llm.c's format, so that published
// GPT-2 shards can be read as they are (their header[3] is 0).

#define SHARD_MAGIC 20240520
#define SHARD_VERSION 1
#define SHARD_HEADER_INTS 256
#define SHARD_HEADER_BYTES (SHARD_HEADER_INTS * 4)
#define SHARD_MAX_VOCAB 65536 // what a uint16 can hold

// A shard appears under its own name only when it is complete. Until then it is
// PATH.PID.tmp, and a program that ends early, by exit(), removes it.
typedef struct ShardWriter {
    char *path;       // final name
    char *temporary;  // name while it is being written; NULL once published
    FILE *file;       // NULL once finished
    int vocab;        // 0: unknown, ids are not checked
    int64_t tokens;   // written so far
} ShardWriter;

// Names to remove at exit: the temporaries of all shards not yet published.
static char **shard_temporaries __attribute__((unused));
static int shard_num_temporaries __attribute__((unused));

TOK_API void shard_remove_temporaries(void) {
    for (int i = 0; i < shard_num_temporaries; i++) unlink(shard_temporaries[i]);
}

// Starts a shard that will be called path. vocab: vocabulary size, or 0 if unknown.
TOK_API void shard_open(ShardWriter *w, const char *path, int vocab) {
    if (vocab < 0 || vocab > SHARD_MAX_VOCAB)
        tok_fail("shard", "%s: found a vocabulary of %d, expected at most %d (tokens are uint16)",
                 path, vocab, SHARD_MAX_VOCAB);
    size_t room = strlen(path) + 32;
    w->path = (char *)tok_realloc(NULL, (int64_t)strlen(path) + 1, 1);
    strcpy(w->path, path);
    w->temporary = (char *)tok_realloc(NULL, (int64_t)room, 1);
    snprintf(w->temporary, room, "%s.%ld.tmp", path, (long)getpid());
    w->vocab = vocab;
    w->tokens = 0;
    w->file = fopen(w->temporary, "wb");
    if (!w->file) tok_fail("shard", "%s: cannot create: %s", w->temporary, strerror(errno));

    static int registered = 0;
    if (!registered && atexit(shard_remove_temporaries) != 0)
        tok_fail("shard", "%s: cannot register its removal at exit", w->temporary);
    registered = 1;
    shard_temporaries = (char **)tok_realloc(shard_temporaries, shard_num_temporaries + 1, sizeof(char *));
    shard_temporaries[shard_num_temporaries++] = w->temporary;

    int32_t blank[SHARD_HEADER_INTS] = {0}; // the real header needs the token count
    if (fwrite(blank, sizeof(blank), 1, w->file) != 1)
        tok_fail("shard", "%s: cannot write: %s", w->temporary, strerror(errno));
}

// Appends n tokens, each below the shard's vocabulary size.
TOK_API void shard_append(ShardWriter *w, const uint16_t *tokens, int64_t n) {
    if (n <= 0) return;
    if (w->tokens + n > INT32_MAX)
        tok_fail("shard", "%s: found %lld tokens, expected at most %d (the header holds an int32)",
                 w->path, (long long)(w->tokens + n), INT32_MAX);
    for (int64_t i = 0; w->vocab && i < n; i++)
        if (tokens[i] >= w->vocab)
            tok_fail("shard", "%s: found token %d at %lld, expected ids below the vocabulary size %d",
                     w->path, tokens[i], (long long)(w->tokens + i), w->vocab);
    if (fwrite(tokens, sizeof(*tokens), (size_t)n, w->file) != (size_t)n)
        tok_fail("shard", "%s: cannot write: %s", w->temporary, strerror(errno));
    w->tokens += n;
}

// Writes the header and brings the file to disk, still under its temporary name.
TOK_API void shard_finish(ShardWriter *w) {
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)w->tokens, w->vocab};
    int ok = fseek(w->file, 0, SEEK_SET) == 0 && fwrite(header, sizeof(header), 1, w->file) == 1 &&
             fflush(w->file) == 0 && fsync(fileno(w->file)) == 0;
    if (!ok) tok_fail("shard", "%s: cannot write: %s", w->temporary, strerror(errno));
    if (fclose(w->file) != 0) tok_fail("shard", "%s: cannot close: %s", w->temporary, strerror(errno));
    w->file = NULL;
}

// Gives a finished shard its own name and frees the writer. A program that
// writes several shards publishes them together, once all are finished.
TOK_API void shard_publish(ShardWriter *w) {
    if (rename(w->temporary, w->path) != 0)
        tok_fail("shard", "%s: cannot rename to %s: %s", w->temporary, w->path, strerror(errno));
    for (int i = 0; i < shard_num_temporaries; i++)
        if (shard_temporaries[i] == w->temporary) {
            shard_temporaries[i] = shard_temporaries[--shard_num_temporaries];
            break;
        }
    if (shard_num_temporaries == 0) {
        free(shard_temporaries);
        shard_temporaries = NULL;
    }
    free(w->temporary);
    free(w->path);
    w->temporary = w->path = NULL;
}

TOK_API void shard_close(ShardWriter *w) {
    shard_finish(w);
    shard_publish(w);
}

// Reads a whole shard into *tokens (allocated here, the caller frees) and
// returns their number. Checks magic, version, size and, where vocab > 0, that
// every id is below vocab and that the header does not name another vocabulary.
TOK_API int64_t shard_read(const char *path, int vocab, uint16_t **tokens) {
    FILE *file = fopen(path, "rb");
    if (!file) tok_fail("shard", "%s: cannot open: %s", path, strerror(errno));
    struct stat info;
    if (fstat(fileno(file), &info) != 0) tok_fail("shard", "%s: cannot examine: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) tok_fail("shard", "%s: found no regular file, expected a shard", path);
    int32_t header[SHARD_HEADER_INTS];
    if (fread(header, sizeof(header), 1, file) != 1)
        tok_fail("shard", "%s: found %lld bytes, expected a header of %d", path, (long long)info.st_size,
                 SHARD_HEADER_BYTES);
    if (header[0] != SHARD_MAGIC || header[1] != SHARD_VERSION)
        tok_fail("shard", "%s: found magic %d version %d, expected %d version %d", path, header[0],
                 header[1], SHARD_MAGIC, SHARD_VERSION);
    int64_t n = header[2], size = SHARD_HEADER_BYTES + 2 * n;
    if (n < 0 || info.st_size != size)
        tok_fail("shard", "%s: found %lld bytes, expected %lld for the %lld tokens of its header", path,
                 (long long)info.st_size, (long long)size, (long long)n);
    if (vocab && header[3] && header[3] != vocab)
        tok_fail("shard", "%s: found a vocabulary of %d, expected %d", path, header[3], vocab);
    *tokens = (uint16_t *)tok_realloc(NULL, n, sizeof(uint16_t));
    if (fread(*tokens, sizeof(uint16_t), (size_t)n, file) != (size_t)n)
        tok_fail("shard", "%s: cannot read: %s", path, ferror(file) ? strerror(errno) : "file shrank");
    if (fclose(file) != 0) tok_fail("shard", "%s: cannot close: %s", path, strerror(errno));
    for (int64_t i = 0; vocab && i < n; i++)
        if ((*tokens)[i] >= vocab)
            tok_fail("shard", "%s: found token %d at %lld, expected ids below the vocabulary size %d",
                     path, (*tokens)[i], (long long)i, vocab);
    return n;
}

// -----------------------------------------------------------------------------
// The vocabulary: token id <-> bytes of the token
//
// A byte-pair vocabulary is a list of byte strings with ranks. The rank is the
// token id, and also the order in which merges were learned: a lower rank merges
// first. A byte vocabulary has the 256 single bytes, so text needs no merging.

typedef struct Tokenizer {
    int vocab;           // number of ids, end-of-text included
    int eot;             // id of end-of-text, which separates documents
    int num_tokens;      // ids that stand for text: 0 .. num_tokens-1
    char *name;          // path of the rank file, for messages
    char *bytes;         // the bytes of all tokens
    int64_t *start;      // [num_tokens] where in bytes a token begins
    int32_t *length;     // [num_tokens] how many bytes it has, at least 1
    int32_t *table;      // [table_mask + 1] hash table from bytes to id, -1 is free
    uint64_t table_mask; // table size - 1, the size being a power of two
    int max_length;      // of any token, in bytes
    pcre2_code *pattern; // how text splits into pieces; NULL for a byte vocabulary
} Tokenizer;

#define TOK_MAX_RANKS (1 << 24)
#define TOK_MAX_RANK_FILE ((int64_t)1 << 30) // bytes

TOK_API uint64_t tok_hash(const char *s, int64_t n) {
    uint64_t h = 0xcbf29ce484222325u; // FNV-1a
    for (int64_t i = 0; i < n; i++) h = (h ^ (uint8_t)s[i]) * 0x100000001b3u;
    return h ^ (h >> 32);
}

// The slot of the table that holds the n bytes at s, or the free slot where they belong.
TOK_API uint64_t tok_slot(const Tokenizer *t, const char *s, int64_t n) {
    uint64_t slot = tok_hash(s, n) & t->table_mask;
    for (;; slot = (slot + 1) & t->table_mask) {
        int32_t id = t->table[slot];
        if (id < 0 || (t->length[id] == n && memcmp(t->bytes + t->start[id], s, (size_t)n) == 0)) return slot;
    }
}

// Id of the token with exactly the n bytes at s, or -1.
TOK_API int32_t tok_lookup(const Tokenizer *t, const char *s, int64_t n) {
    return n > t->max_length ? -1 : t->table[tok_slot(t, s, n)];
}

// Writes up to 40 bytes of s to out in a printable form; returns out.
#define TOK_QUOTE_ROOM 176
TOK_API const char *tok_quote(const char *s, int64_t n, char *out) {
    char *p = out;
    *p++ = '"';
    for (int64_t i = 0; i < n && i < 40; i++) {
        uint8_t c = (uint8_t)s[i];
        if (c < 0x20 || c > 0x7e || c == '"' || c == '\\') p += snprintf(p, 5, "\\x%02x", c);
        else *p++ = (char)c;
    }
    strcpy(p, n > 40 ? "...\"" : "\"");
    return out;
}

// -----------------------------------------------------------------------------
// Pieces: a token never reaches across the borders between them
//
// GPT-2 first splits text into pieces: a contraction, a word, a number or a run
// of punctuation, each with the one space before it, or a run of white space
// that leaves its last character to the piece after it. White space is spelled
// out because libraries disagree about \s: here it is Unicode's White_Space
// property (PCRE2 would add U+180E).

#define TOK_SPACE \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define TOK_PATTERN                                                     \
    "'s|'t|'re|'ve|'m|'ll|'d"                                           \
    "| ?\\p{L}+"                                                        \
    "| ?\\p{N}+"                                                        \
    "| ?[^" TOK_SPACE "\\p{L}\\p{N}]+"                                  \
    "|[" TOK_SPACE "]+(?![^" TOK_SPACE "])"                             \
    "|[" TOK_SPACE "]+"

TOK_API pcre2_code *tok_compile_pattern(void) {
    int error;
    PCRE2_SIZE offset;
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED; // anchored: pieces leave no gaps
    pcre2_code *pattern = pcre2_compile((PCRE2_SPTR)TOK_PATTERN, PCRE2_ZERO_TERMINATED, options, &error,
                                        &offset, NULL);
    if (!pattern)
        tok_fail("tokenizer", "found a PCRE2 library that refuses the pattern (error %d), expected one with Unicode support",
                 error);
    (void)pcre2_jit_compile(pattern, PCRE2_JIT_COMPLETE); // where there is no JIT, matching is just slower
    return pattern;
}

// Number of bytes (1 to 4) of the valid UTF-8 character at s, or 0 if there is none.
TOK_API int tok_utf8_length(const char *s, int64_t n) {
    const uint8_t *u = (const uint8_t *)s;
    if (n < 1) return 0;
    if (u[0] < 0x80) return 1;
    int length = u[0] >= 0xc2 && u[0] <= 0xdf ? 2 : (u[0] & 0xf0) == 0xe0 ? 3 : u[0] >= 0xf0 && u[0] <= 0xf4 ? 4 : 0;
    if (length == 0 || n < length) return 0;
    for (int i = 1; i < length; i++)
        if ((u[i] & 0xc0) != 0x80) return 0;
    if ((u[0] == 0xe0 && u[1] < 0xa0) || (u[0] == 0xf0 && u[1] < 0x90)) return 0; // too long a form
    if ((u[0] == 0xed && u[1] > 0x9f) || (u[0] == 0xf4 && u[1] > 0x8f)) return 0; // surrogate, > U+10FFFF
    return length;
}

// Whether the last character of the n bytes at s is white space of more than one byte.
TOK_API int tok_ends_in_wide_space(const char *s, int64_t n) {
    const uint8_t *end = (const uint8_t *)s + n;
    if (n >= 2 && end[-2] == 0xc2) return end[-1] == 0x85 || end[-1] == 0xa0;
    if (n < 3) return 0;
    int c = (end[-3] << 16) | (end[-2] << 8) | end[-1];
    return c == 0xe19a80 || (c >= 0xe28080 && c <= 0xe2808a) || c == 0xe280a8 || c == 0xe280a9 ||
           c == 0xe280af || c == 0xe2819f || c == 0xe38080;
}

// The last place c <= n-1 where text may be cut in two without changing its
// tokens, whatever follows the n bytes; 0 if there is none.
//
// The rule: the byte at c is ASCII white space and the character before it is
// not white space. No piece has white space after anything else, so a piece ends
// at c. The pieces to the left stay as they are: the pattern looks ahead only
// from the end of a white-space run, and the left part does not end in one. The
// pieces to the right stay as they are because the pattern never looks behind.
TOK_API int64_t tokenizer_safe_cut(const char *text, int64_t n) {
    for (int64_t c = n - 1; c > 0; c--) {
        char right = text[c], left = text[c - 1];
        if (right != ' ' && !(right >= '\t' && right <= '\r')) continue;
        if (left == ' ' || (left >= '\t' && left <= '\r') || tok_ends_in_wide_space(text, c)) continue;
        return c;
    }
    return 0;
}

// -----------------------------------------------------------------------------
// Loading a vocabulary

TOK_API int tok_base64_value(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// Decodes the n characters at s to out (room for n * 3 / 4 bytes); returns the
// number of bytes, or -1 if s is not base64 in its one canonical form.
TOK_API int64_t tok_base64_decode(const char *s, int64_t n, char *out) {
    if (n == 0 || n % 4 != 0) return -1;
    int64_t padding = s[n - 1] != '=' ? 0 : s[n - 2] != '=' ? 1 : 2, bytes = 0;
    uint32_t bits = 0;
    for (int64_t i = 0; i < n; i++) {
        int value = i < n - padding ? tok_base64_value(s[i]) : 0;
        if (value < 0) return -1;
        bits = (bits << 6) | (uint32_t)value;
        if (i % 4 != 3) continue;
        int64_t keep = i == n - 1 ? 3 - padding : 3;
        for (int64_t k = 0; k < keep; k++) out[bytes++] = (char)(bits >> (16 - 8 * k));
        if (bits & ((1u << (8 * (3 - keep))) - 1)) return -1; // bits that belong to no byte
        bits = 0;
    }
    return bytes;
}

// Reads the whole file; returns its bytes (the caller frees) and their number in *n.
TOK_API char *tok_read_file(const char *path, int64_t *n) {
    FILE *file = fopen(path, "rb");
    if (!file) tok_fail("tokenizer", "%s: cannot open: %s", path, strerror(errno));
    char *data = NULL;
    int64_t room = 1 << 20;
    *n = 0;
    for (;;) {
        data = (char *)tok_realloc(data, room, 1);
        *n += (int64_t)fread(data + *n, 1, (size_t)(room - *n), file);
        if (ferror(file)) tok_fail("tokenizer", "%s: cannot read: %s", path, strerror(errno));
        if (*n < room) break;
        if (*n >= TOK_MAX_RANK_FILE)
            tok_fail("tokenizer", "%s: found more than %lld bytes, expected a rank file", path,
                     (long long)TOK_MAX_RANK_FILE);
        room *= 2;
    }
    fclose(file); // opened for reading: nothing can be lost
    return data;
}

// Stores one line "BASE64 RANK" of a rank file. used: bytes of t->bytes taken so far.
TOK_API void tok_load_line(Tokenizer *t, const char *line, int64_t n, int64_t number, int64_t *used) {
    char quoted[TOK_QUOTE_ROOM];
    const char *space = (const char *)memchr(line, ' ', (size_t)n);
    if (!space)
        tok_fail("tokenizer", "%s:%lld: found %s, expected base64, a space and a rank", t->name,
                 (long long)number, tok_quote(line, n, quoted));
    int64_t length = tok_base64_decode(line, space - line, t->bytes + *used);
    if (length < 1)
        tok_fail("tokenizer", "%s:%lld: found %s, expected the base64 of a token", t->name, (long long)number,
                 tok_quote(line, space - line, quoted));
    const char *digits = space + 1, *end = line + n;
    int64_t rank = digits == end || (*digits == '0' && end - digits > 1) ? -1 : 0;
    for (const char *p = digits; p < end && rank >= 0; p++)
        rank = *p >= '0' && *p <= '9' && rank <= TOK_MAX_RANKS ? rank * 10 + (*p - '0') : -1;
    if (rank < 0 || rank >= t->num_tokens)
        tok_fail("tokenizer", "%s:%lld: found the rank %s, expected the ranks 0 to %d (lines: %d)",
                 t->name, (long long)number, tok_quote(digits, end - digits, quoted), t->num_tokens - 1,
                 t->num_tokens);
    if (t->length[rank])
        tok_fail("tokenizer", "%s:%lld: found the rank %lld again, expected every rank once", t->name,
                 (long long)number, (long long)rank);
    uint64_t slot = tok_slot(t, t->bytes + *used, length);
    if (t->table[slot] >= 0)
        tok_fail("tokenizer", "%s:%lld: found the bytes of rank %d again, expected every token once", t->name,
                 (long long)number, t->table[slot]);
    t->table[slot] = (int32_t)rank;
    t->start[rank] = *used;
    t->length[rank] = (int32_t)length;
    if (length > t->max_length) t->max_length = (int)length;
    *used += length;
}

// Reads a .tiktoken rank file: on each line the base64 of a token's bytes, a
// space and its rank; the ranks are 0 to N-1, each once, in any order. Then
// end-of-text is id N and the vocabulary has N+1 ids. Any fault of the file is
// one line "tokenizer: PATH:LINE: found ..., expected ..." and exit(1).
TOK_API void tokenizer_load(Tokenizer *t, const char *path) {
    memset(t, 0, sizeof(*t));
    t->name = (char *)tok_realloc(NULL, (int64_t)strlen(path) + 1, 1);
    strcpy(t->name, path);
    int64_t n, used = 0, lines = 0;
    char *data = tok_read_file(path, &n);
    for (int64_t i = 0; i < n; i++) lines += data[i] == '\n' || i == n - 1;
    if (lines < 1 || lines > TOK_MAX_RANKS)
        tok_fail("tokenizer", "%s:1: found %lld lines, expected 1 to %d, each base64, a space and a rank", path,
                 (long long)lines, TOK_MAX_RANKS);

    t->num_tokens = (int)lines;
    t->eot = t->num_tokens;
    t->vocab = t->num_tokens + 1;
    t->bytes = (char *)tok_realloc(NULL, n, 1); // base64 is longer than what it encodes
    t->start = (int64_t *)tok_realloc(NULL, lines, sizeof(int64_t));
    t->length = (int32_t *)tok_realloc(NULL, lines, sizeof(int32_t));
    memset(t->length, 0, (size_t)lines * sizeof(int32_t)); // 0: not yet seen
    uint64_t size = 1024;
    while (size < 2 * (uint64_t)lines) size *= 2; // at most half full
    t->table = (int32_t *)tok_realloc(NULL, (int64_t)size, sizeof(int32_t));
    memset(t->table, 0xff, size * sizeof(int32_t)); // -1: free
    t->table_mask = size - 1;

    int64_t number = 1;
    for (int64_t i = 0; i < n; number++) {
        const char *newline = (const char *)memchr(data + i, '\n', (size_t)(n - i));
        int64_t end = newline ? newline - data : n;
        tok_load_line(t, data + i, end - i, number, &used);
        i = end + 1;
    }
    free(data);
    t->pattern = tok_compile_pattern();
}

// The byte vocabulary: token id = byte value, 256 ids. Byte 0 doubles as
// end-of-text, so text that contains byte 0 reads as several documents.
TOK_API void tokenizer_bytes(Tokenizer *t) {
    memset(t, 0, sizeof(*t));
    t->vocab = t->num_tokens = 256;
    t->bytes = (char *)tok_realloc(NULL, 256, 1);
    t->start = (int64_t *)tok_realloc(NULL, 256, sizeof(int64_t));
    t->length = (int32_t *)tok_realloc(NULL, 256, sizeof(int32_t));
    for (int i = 0; i < 256; i++) {
        t->bytes[i] = (char)i;
        t->start[i] = i;
        t->length[i] = 1;
    }
}

TOK_API void tokenizer_free(Tokenizer *t) {
    if (t->pattern) pcre2_code_free(t->pattern);
    free(t->name);
    free(t->bytes);
    free(t->start);
    free(t->length);
    free(t->table);
    memset(t, 0, sizeof(*t));
}

// -----------------------------------------------------------------------------
// Byte-pair merging: from the bytes of one piece to its tokens
//
// The piece starts as single bytes. Of all neighbouring pairs whose joined bytes
// are a token, the one with the lowest rank (the leftmost of equals) becomes one
// part, until no pair is a token. Parts are a linked list over byte positions,
// and candidate pairs wait in a heap, so n bytes take O(n log n) steps even if
// the piece is a megabyte of one letter.

typedef struct TokMerger {
    int64_t room;    // bytes of the longest piece that the arrays can take
    uint32_t *prev;  // [room] for a part that begins at i: where the part before begins
    uint32_t *next;  // [room] and where the part after begins
    int32_t *rank;   // [room] rank of the pair of this part and the next; -1 if that is no token
    uint64_t *heap;  // [3 * room] rank << 32 | position, the least first
    int64_t heap_size;
} TokMerger;

TOK_API void tok_merger_free(TokMerger *m) {
    free(m->prev);
    free(m->next);
    free(m->rank);
    free(m->heap);
}

TOK_API void tok_heap_push(TokMerger *m, uint64_t key) {
    int64_t i = m->heap_size++;
    for (; i > 0 && m->heap[(i - 1) / 2] > key; i = (i - 1) / 2) m->heap[i] = m->heap[(i - 1) / 2];
    m->heap[i] = key;
}

TOK_API uint64_t tok_heap_pop(TokMerger *m) {
    uint64_t least = m->heap[0], key = m->heap[--m->heap_size];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < m->heap_size; i = child) {
        if (child + 1 < m->heap_size && m->heap[child + 1] < m->heap[child]) child++;
        if (m->heap[child] >= key) break;
        m->heap[i] = m->heap[child];
    }
    m->heap[i] = key;
    return least;
}

// Looks up the pair that begins at i and, if it is a token, makes it a candidate.
TOK_API void tok_consider_pair(const Tokenizer *t, TokMerger *m, const char *piece, uint32_t n, uint32_t i) {
    uint32_t second = m->next[i];
    m->rank[i] = second < n ? tok_lookup(t, piece + i, m->next[second] - i) : -1;
    if (m->rank[i] >= 0) tok_heap_push(m, (uint64_t)m->rank[i] << 32 | i);
}

// Merges the n bytes of piece and writes the tokens to out, which has room for
// n of them; returns their number. A byte that no token covers ends the program.
TOK_API int64_t tok_merge_piece(const Tokenizer *t, TokMerger *m, const char *piece, int64_t length, int32_t *out) {
    char quoted[TOK_QUOTE_ROOM];
    if (length > INT32_MAX)
        tok_fail("tokenizer", "found a piece of %lld bytes, %s, expected at most %d", (long long)length,
                 tok_quote(piece, length, quoted), INT32_MAX);
    uint32_t n = (uint32_t)length;
    if (length > m->room) {
        m->room = length < 256 ? 256 : length;
        m->prev = (uint32_t *)tok_realloc(m->prev, m->room, sizeof(uint32_t));
        m->next = (uint32_t *)tok_realloc(m->next, m->room, sizeof(uint32_t));
        m->rank = (int32_t *)tok_realloc(m->rank, m->room, sizeof(int32_t));
        m->heap = (uint64_t *)tok_realloc(m->heap, 3 * m->room, sizeof(uint64_t)); // n pairs, 2 a merge
    }
    m->heap_size = 0;
    for (uint32_t i = 0; i < n; i++) {
        m->prev[i] = i - 1; // of the first part: never followed
        m->next[i] = i + 1;
    }
    for (uint32_t i = 0; i < n; i++) tok_consider_pair(t, m, piece, n, i);

    while (m->heap_size > 0) {
        uint64_t key = tok_heap_pop(m);
        uint32_t i = (uint32_t)key;
        if (m->rank[i] != (int32_t)(key >> 32)) continue; // the pair changed after it was pushed
        uint32_t second = m->next[i];
        m->rank[second] = -1; // no longer the beginning of a part
        m->next[i] = m->next[second];
        if (m->next[i] < n) m->prev[m->next[i]] = i;
        tok_consider_pair(t, m, piece, n, i);
        if (i > 0) tok_consider_pair(t, m, piece, n, m->prev[i]);
    }

    int64_t count = 0;
    for (uint32_t i = 0; i < n; i = m->next[i]) {
        out[count] = tok_lookup(t, piece + i, m->next[i] - i);
        if (out[count++] < 0)
            tok_fail("tokenizer", "%s: found no token for byte 0x%02x of the piece %s, expected one", t->name,
                     (uint8_t)piece[i], tok_quote(piece, length, quoted));
    }
    return count;
}

// -----------------------------------------------------------------------------
// Encoding and decoding

// A growing list of ids, as the caller of tokenizer_encode sees it.
typedef struct TokOutput {
    int32_t **ids;
    int64_t *room;
    int64_t count;
} TokOutput;

// Appends the tokens of one piece. A piece that is a token needs no merging,
// which also lets vocabularies of whole words work.
TOK_API void tok_encode_piece(const Tokenizer *t, TokMerger *m, const char *piece, int64_t n, TokOutput *out) {
    if (out->count + n > *out->room) {
        *out->room = 2 * (out->count + n);
        *out->ids = (int32_t *)tok_realloc(*out->ids, *out->room, sizeof(int32_t));
    }
    int32_t whole = tok_lookup(t, piece, n);
    if (whole >= 0) (*out->ids)[out->count++] = whole;
    else out->count += tok_merge_piece(t, m, piece, n, *out->ids + out->count);
}

// Encodes the n bytes at text. *out is a buffer of *cap ids that grows as needed;
// start with NULL and 0, reuse it for further calls, free it at the end. Returns
// the number of ids. Writes no end-of-text: "<|endoftext|>" in text is text.
//
// Text that is not UTF-8 keeps every byte: a longest run of bytes that belong to
// no valid character is a piece of its own, and the valid text on either side
// is split as if it stood alone. Calls on one Tokenizer may run in parallel.
TOK_API int64_t tokenizer_encode(const Tokenizer *t, const char *text, int64_t n, int32_t **out, int64_t *cap) {
    TokOutput output = {out, cap, 0};
    if (!t->pattern) { // byte vocabulary
        if (n > *cap) {
            *cap = n;
            *out = (int32_t *)tok_realloc(*out, n, sizeof(int32_t));
        }
        for (int64_t i = 0; i < n; i++) (*out)[i] = (uint8_t)text[i];
        return n;
    }
    TokMerger merger = {0, NULL, NULL, NULL, NULL, 0};
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    if (!match) tok_fail("tokenizer", "out of memory for a PCRE2 match");
    for (int64_t i = 0; i < n;) {
        int64_t bad = i; // text[i..bad) is invalid
        while (bad < n && tok_utf8_length(text + bad, n - bad) == 0) bad++;
        if (bad > i) tok_encode_piece(t, &merger, text + i, bad - i, &output);
        int64_t end = bad; // text[bad..end) is valid
        for (int length; (length = tok_utf8_length(text + end, n - end)) > 0;) end += length;

        PCRE2_SIZE position = 0, size = (PCRE2_SIZE)(end - bad);
        while (position < size) {
            int rc = pcre2_match(t->pattern, (PCRE2_SPTR)(text + bad), size, position, PCRE2_NO_UTF_CHECK, match, NULL);
            PCRE2_SIZE stop = rc > 0 ? pcre2_get_ovector_pointer(match)[1] : position;
            if (stop <= position) // cannot happen: every character belongs to some alternative
                tok_fail("tokenizer", "found PCRE2 result %d at byte %lld, expected a match", rc, (long long)(bad + (int64_t)position));
            tok_encode_piece(t, &merger, text + bad + position, (int64_t)(stop - position), &output);
            position = stop;
        }
        i = end;
    }
    pcre2_match_data_free(match);
    tok_merger_free(&merger);
    return output.count;
}

// The bytes of a token, *len of them, not NUL-terminated, owned by t. End-of-text
// of a rank file gives "<|endoftext|>"; an id outside the vocabulary gives no bytes.
TOK_API const char *tokenizer_decode(const Tokenizer *t, int32_t id, int *len) {
    if (id >= 0 && id < t->num_tokens) {
        *len = t->length[id];
        return t->bytes + t->start[id];
    }
    const char *text = id == t->eot ? "<|endoftext|>" : "";
    *len = (int)strlen(text);
    return text;
}

#endif
