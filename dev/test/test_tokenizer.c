// Tests of data/tokenizer.h and of the program data/tokenize.
//
// Most build their own small vocabulary. Those that need the GPT-2 ranks or the
// sample text look in $SHARED_DATA (default ../shared/data) and are skipped,
// with a message, where these are missing. $TOKENIZE is the program to test
// (default data/tokenize). Run from the root of the repository.
#define _GNU_SOURCE
#include "../../data/tokenizer.h"

#include <criterion/criterion.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

// Under AddressSanitizer, Criterion's own leaks would fail every run. Leaks of the
// code under test are found by valgrind, and in data/tokenize by its own sanitizer.
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "detect_leaks=0";
}

// -----------------------------------------------------------------------------
// Helpers: a folder per test, small files, children, a small vocabulary

static char folder[64]; // removed after each test

static void make_folder(void) {
    strcpy(folder, "/tmp/test_tokenizer.XXXXXX");
    cr_assert(mkdtemp(folder), "cannot make a folder");
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *state) {
    (void)info, (void)type, (void)state;
    return remove(path);
}

static void remove_folder(void) {
    nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

TestSuite(tokenizer, .init = make_folder, .fini = remove_folder, .timeout = 120);
TestSuite(shard, .init = make_folder, .fini = remove_folder, .timeout = 60);
TestSuite(program, .init = make_folder, .fini = remove_folder, .timeout = 120);

// Path of a file in the test's folder; the last few results stay valid.
static const char *in_folder(const char *name) {
    static char paths[8][PATH_MAX];
    static int turn;
    char *path = paths[turn++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return path;
}

static const char *write_file(const char *name, const void *data, size_t n) {
    const char *path = in_folder(name);
    FILE *f = fopen(path, "wb");
    cr_assert(f && fwrite(data, 1, n, f) == n && fclose(f) == 0, "cannot write %s", path);
    return path;
}

static const char *write_text(const char *name, const char *text) {
    return write_file(name, text, strlen(text));
}

// Reads a file of the folder as a string (the caller frees).
static char *read_text(const char *name) {
    int64_t n;
    char *data = tok_read_file(in_folder(name), &n);
    data = tok_realloc(data, n + 1, 1);
    data[n] = 0;
    return data;
}

// Runs f(argument) in a child process. Returns its exit status (or -1) and in
// message what it wrote to stderr.
static int run_child(void (*f)(const void *), const void *argument, char *message, size_t room) {
    int ends[2], status;
    size_t n = 0;
    cr_assert(pipe(ends) == 0);
    fflush(NULL);
    pid_t child = fork();
    cr_assert(child >= 0);
    if (child == 0) {
        if (dup2(ends[1], STDERR_FILENO) < 0) _exit(99);
        close(ends[0]);
        f(argument);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; n + 1 < room && (got = read(ends[0], message + n, room - 1 - n)) > 0;) n += (size_t)got;
    message[n] = 0;
    close(ends[0]);
    cr_assert(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Expects that f(argument) ends the program with one line that contains part.
static void expect_failure(void (*f)(const void *), const void *argument, const char *part) {
    char message[4096];
    int status = run_child(f, argument, message, sizeof(message));
    cr_expect(status == 1, "exit status %d, expected 1, for: %s", status, part);
    cr_expect(strstr(message, part), "message: %s expected in it: %s", message, part);
    char *newline = strchr(message, '\n');
    cr_expect(newline && newline[1] == 0, "expected one line, found: %s", message);
}

typedef struct Bytes {
    const char *s;
    int n;
} Bytes;

static void put_base64(FILE *f, const char *s, int n) {
    const char *digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < n; i += 3) {
        uint32_t bits = 0;
        for (int k = 0; k < 3; k++) bits = bits << 8 | (i + k < n ? (uint8_t)s[i + k] : 0);
        for (int k = 0; k < 4; k++) fputc(i + k <= n ? digits[bits >> (18 - 6 * k) & 63] : '=', f);
    }
}

// Writes a rank file with the 256 single bytes, of which byte b has rank 255 - b
// (so that ids are not bytes by accident), and then the given tokens.
static const char *write_ranks(const char *name, const Bytes *tokens, int n) {
    const char *path = in_folder(name);
    FILE *f = fopen(path, "wb");
    cr_assert(f);
    for (int i = 0; i < 256 + n; i++) {
        char byte = (char)(255 - i);
        if (i < 256) put_base64(f, &byte, 1);
        else put_base64(f, tokens[i - 256].s, tokens[i - 256].n);
        fprintf(f, " %d\n", i);
    }
    cr_assert(fclose(f) == 0);
    return path;
}

#define T(s) {s, sizeof(s) - 1}
static const Bytes small_merges[] = {
    T("aa"), T("ab"), T("  "), T("he"), T("ll"), T("aab"), T("    "), T("aaaa"), T("llo"), T("bab"),
    T("hello"), T("ba"), T(" h"), T("\n\n"), T("or"), T(" w"), T("\xc3\xa9"), T("abab"), T("        "), T("\xff\xff"),
    T("wor"), T("ld"), T(" world"), T(" b"), T("'s"), T("aaab"), T("  a"), T("\xc2\xa0"), T("\xc2\xa0 "),
};
#define NUM_SMALL_MERGES ((int)(sizeof(small_merges) / sizeof(small_merges[0])))

static void load_small(Tokenizer *t) {
    tokenizer_load(t, write_ranks("small.tiktoken", small_merges, NUM_SMALL_MERGES));
}

// splitmix64
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// Text of n bytes made of fragments that are awkward for a tokenizer.
static void random_text(char *s, int n, uint64_t *state) {
    static const Bytes parts[] = {
        T("a"), T("b"), T("ab"), T("aa"), T("hello"), T(" "), T(" "), T("  "), T("\n"), T("\t"), T("\r\n"), T("'s"),
        T("'ll"), T("'"), T("1"), T("23"), T("."), T("--"), T("\xc3\xa9"), T("\xe6\x97\xa5"), T("\xf0\x9f\x98\x80"),
        T("\xc2\xa0"), T("\xe3\x80\x80"), T("\xe1\xa0\x8e"), T("\xe2\x80\xa8"), T("\xff"), T("\xe6\x97"), T("\xc2"),
        T("\x80"), T("\xed\xa0\x80"), T("\0"), T("\x1c"), T("<|endoftext|>"), T("\x85"), T("\xa0"),
    };
    for (int i = 0; i < n;) {
        const Bytes *p = &parts[next_random(state) % (sizeof(parts) / sizeof(parts[0]))];
        for (int k = 0; k < p->n && i < n; k++) s[i++] = p->s[k];
    }
}

// Checks that the ids decode to exactly the n bytes at s.
static void expect_round_trip(const Tokenizer *t, const char *s, int64_t n, const int32_t *ids, int64_t count) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        int length;
        const char *bytes = tokenizer_decode(t, ids[i], &length);
        cr_assert(length > 0 && at + length <= n && memcmp(bytes, s + at, (size_t)length) == 0,
                  "token %d at byte %lld does not decode to the text", ids[i], (long long)at);
        at += length;
    }
    cr_assert(at == n, "decoded %lld bytes, expected %lld", (long long)at, (long long)n);
}

// Path of a file of the shared data, or the test is skipped.
static const char *shared_data(const char *name) {
    static char paths[2][PATH_MAX];
    static int turn;
    const char *base = getenv("SHARED_DATA");
    char *path = paths[turn++ % 2];
    snprintf(path, PATH_MAX, "%s/%s", base ? base : "../shared/data", name);
    if (access(path, R_OK) != 0) {
        fprintf(stderr, "SKIPPED: %s is missing (set SHARED_DATA)\n", path);
        cr_skip_test("%s is missing", path);
    }
    return path;
}

// -----------------------------------------------------------------------------
// Splitting into pieces

// Adds token to the list of those of more than one byte, once.
static void add_token(Bytes *list, int *n, Bytes token) {
    for (int i = 0; i < *n; i++)
        if (list[i].n == token.n && memcmp(list[i].s, token.s, (size_t)token.n) == 0) return;
    if (token.n > 1) list[(*n)++] = token;
}

// Encodes text with a vocabulary that has each expected piece as a token, so that
// the tokens are the pieces. It also has each two neighbours joined, so that two
// pieces taken for one give another token. The pieces, joined, are the text.
static void expect_pieces(const Bytes *pieces, int n) {
    Bytes unique[32] = {{NULL, 0}};
    int num_unique = 0;
    char text[512];
    int size = 0;
    for (int i = 0; i < n; i++) {
        memcpy(text + size, pieces[i].s, (size_t)pieces[i].n);
        add_token(unique, &num_unique, pieces[i]);
        if (i > 0) add_token(unique, &num_unique, (Bytes){text + size - pieces[i - 1].n, pieces[i - 1].n + pieces[i].n});
        size += pieces[i].n;
    }
    Tokenizer t;
    tokenizer_load(&t, write_ranks("pieces.tiktoken", unique, num_unique));
    int32_t *ids = NULL;
    int64_t room = 0, count = tokenizer_encode(&t, text, size, &ids, &room);
    char quoted[TOK_QUOTE_ROOM];
    for (int i = 0; i < n && i < count; i++) {
        int length;
        const char *bytes = tokenizer_decode(&t, ids[i], &length);
        cr_expect(length == pieces[i].n && memcmp(bytes, pieces[i].s, (size_t)length) == 0,
                  "piece %d of %s is not the expected one", i, tok_quote(text, size, quoted));
    }
    cr_expect(count == n, "%s: %lld pieces, expected %d", tok_quote(text, size, quoted), (long long)count, n);
    free(ids);
    tokenizer_free(&t);
}
#define PIECES(...)                                                            \
    do {                                                                       \
        const Bytes pieces[] = {__VA_ARGS__};                                  \
        expect_pieces(pieces, (int)(sizeof(pieces) / sizeof(pieces[0])));      \
    } while (0)

Test(tokenizer, pieces) {
    PIECES(T("I"), T("'ll"), T(" say"), T(" we"), T("'ve"), T(" don"), T("'t"), T("?"));
    PIECES(T("he"), T("'s"), T(" I"), T("'m"), T(" you"), T("'re"), T(" she"), T("'d"), T(" '"), T("x"));
    PIECES(T("HE"), T("'"), T("S")); // contractions are lower case
    PIECES(T("x"), T("   "), T(" y"), T("\n\n\n "), T(" z"), T("  "));
    PIECES(T("abc"), T("12"), T("!?"), T(" 3"), T("."), T("14"), T(" --"), T("\t"), T("a"));
    PIECES(T("a"), T("\n"), T("\n"), T("b"), T("\r\n "), T(" c"));
    PIECES(T("caf\xc3\xa9"), T(" \xe6\x97\xa5\xe6\x9c\xac"), T("\xe3\x80\x82"), T("\xd9\xa1\xd9\xa2"), T(" \xf0\x9f\x98\x80!"));
    PIECES(T("e"), T("\xcc\x81"), T("x")); // a combining accent is no letter
}

// Unicode's White_Space property, and look-alikes outside it.
Test(tokenizer, white_space) {
    static const Bytes spaces[] = {T("\t"), T("\v"), T("\f"), T("\r"), T("\xc2\x85"), T("\xc2\xa0"), T("\xe1\x9a\x80"),
                                   T("\xe2\x80\x80"), T("\xe2\x80\x8a"), T("\xe2\x80\xa8"), T("\xe2\x80\xa9"),
                                   T("\xe2\x80\xaf"), T("\xe2\x81\x9f"), T("\xe3\x80\x80")};
    static const Bytes others[] = {T("\xe1\xa0\x8e"), T("\xe2\x80\x8b"), T("\xef\xbb\xbf"), T("\x1c"), T("\x1f"), T("\0"), T("\x7f")};
    for (size_t i = 0; i < sizeof(spaces) / sizeof(spaces[0]); i++) {
        PIECES(T("a"), spaces[i], spaces[i], T("b"));
        char line[8] = "";
        memcpy(line, spaces[i].s, (size_t)spaces[i].n);
        line[spaces[i].n] = '\n'; // white space on both sides: no place to cut
        cr_expect(tokenizer_safe_cut(line, spaces[i].n + 1) == 0, "cut after white space %zu", i);
    }
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        char twice[8];
        memcpy(twice, others[i].s, (size_t)others[i].n);
        memcpy(twice + others[i].n, others[i].s, (size_t)others[i].n);
        PIECES(T("a"), {twice, 2 * others[i].n}, T("b"));
    }
}

Test(tokenizer, invalid_utf8_pieces) {
    PIECES(T("a"), T("\xff\xfe"), T(" b"));
    PIECES(T("x"), T("  "), T("\xff"), T(" y"));            // the run of spaces ends at the bad byte
    PIECES(T("ab"), T("\xe6\x97"), T("cd"));                // cut short
    PIECES(T("x"), T("\xc1\xa1"), T("y"));                  // the letter a, longer than needed
    PIECES(T("x"), T("\xe0\x81\xa1"), T("y"), T("\xf0\x80\x81\xa1"), T("z"));
    PIECES(T("!"), T("\xed\xa0\x80"), T("?"));              // surrogate
    PIECES(T("!"), T("\xf4\x90\x80\x80"), T("?"));          // above U+10FFFF
    PIECES(T("\xf4\x8f\xbf\xbf"), T("a"), T("\xf5\x80"), T("1"));
    PIECES(T("\x80\x80"), T(" \xc3\xa9"), T("\xc3"));
}

// -----------------------------------------------------------------------------
// Merging

// The textbook way: look at all pairs, join the first of the lowest rank, repeat.
static int naive_merge(const Bytes *tokens, int n, const char *s, int size, Bytes *parts) {
    int count = size;
    for (int i = 0; i < size; i++) parts[i] = (Bytes){s + i, 1};
    for (;;) {
        int best = n, where = -1;
        for (int i = 0; i + 1 < count; i++)
            for (int r = 0; r < best; r++)
                if (tokens[r].n == parts[i].n + parts[i + 1].n && memcmp(tokens[r].s, parts[i].s, (size_t)tokens[r].n) == 0)
                    best = r, where = i;
        if (where < 0) return count;
        parts[where].n += parts[where + 1].n;
        count--;
        for (int i = where + 1; i < count; i++) parts[i] = parts[i + 1];
    }
}

Test(tokenizer, merging_equals_naive) {
    Tokenizer t;
    load_small(&t);
    TokMerger merger = {0};
    uint64_t state = 1;
    for (int round = 0; round < 5000; round++) {
        char s[64];
        int32_t ids[64];
        Bytes parts[64];
        int size = 1 + (int)(next_random(&state) % 64);
        for (int i = 0; i < size; i++) s[i] = "aaab  hlo"[next_random(&state) % (round % 2 ? 4 : 9)];
        int64_t count = tok_merge_piece(&t, &merger, s, size, ids);
        int expected = naive_merge(small_merges, NUM_SMALL_MERGES, s, size, parts);
        cr_assert(count == expected, "%.*s: %lld tokens, expected %d", size, s, (long long)count, expected);
        for (int i = 0; i < count; i++) cr_assert(t.length[ids[i]] == parts[i].n, "%.*s: token %d differs", size, s, i);
        expect_round_trip(&t, s, size, ids, count);
    }
    tok_merger_free(&merger);
    tokenizer_free(&t);
}

// A piece that is a token is one token even if merging would not reach it.
Test(tokenizer, whole_words) {
    Tokenizer t;
    tokenizer_load(&t, write_text("words.tiktoken", "aGVsbG8= 0\nIHdvcmxk 2\nIQ== 1\n")); // hello, " world", !
    int32_t *ids = NULL;
    int64_t room = 0;
    cr_assert(tokenizer_encode(&t, "hello world!", 12, &ids, &room) == 3);
    cr_expect(ids[0] == 0 && ids[1] == 2 && ids[2] == 1);
    cr_expect(t.vocab == 4 && t.eot == 3);
    free(ids);
    tokenizer_free(&t);
}

static void encode_uncovered(const void *path) {
    Tokenizer t;
    tokenizer_load(&t, path);
    int32_t *ids = NULL;
    int64_t room = 0;
    tokenizer_encode(&t, "hello there", 11, &ids, &room);
}

Test(tokenizer, uncovered_byte_is_an_error) {
    expect_failure(encode_uncovered, write_text("words.tiktoken", "aGVsbG8= 0\n"),
                   "words.tiktoken: found no token for byte 0x20 of the piece \" there\"");
}

// -----------------------------------------------------------------------------
// Encoding

Test(tokenizer, empty_text) {
    Tokenizer t, b;
    load_small(&t);
    tokenizer_bytes(&b);
    int32_t *ids = NULL;
    int64_t room = 0;
    cr_expect(tokenizer_encode(&t, "", 0, &ids, &room) == 0);
    cr_expect(tokenizer_encode(&t, NULL, 0, &ids, &room) == 0);
    cr_expect(tokenizer_encode(&b, NULL, 0, &ids, &room) == 0);
    free(ids);
    tokenizer_free(&t);
    tokenizer_free(&b);
}

Test(tokenizer, round_trip_of_any_bytes) {
    Tokenizer t[2];
    load_small(&t[0]);
    tokenizer_bytes(&t[1]);
    int32_t *ids = NULL;
    int64_t room = 0;
    uint64_t state = 2;
    char s[300];
    for (int round = 0; round < 4000; round++) {
        int n = (int)(next_random(&state) % sizeof(s));
        if (round % 2) random_text(s, n, &state);
        else
            for (int i = 0; i < n; i++) s[i] = (char)next_random(&state);
        for (int k = 0; k < 2; k++) {
            int64_t count = tokenizer_encode(&t[k], s, n, &ids, &room);
            expect_round_trip(&t[k], s, n, ids, count);
            for (int64_t i = 0; i < count; i++) cr_assert(ids[i] >= 0 && ids[i] < t[k].num_tokens, "id %d", ids[i]);
        }
    }
    free(ids);
    tokenizer_free(&t[0]);
    tokenizer_free(&t[1]);
}

Test(tokenizer, byte_vocabulary) {
    Tokenizer t;
    tokenizer_bytes(&t);
    int32_t *ids = NULL;
    int64_t room = 0;
    cr_assert(tokenizer_encode(&t, "A\xff", 2, &ids, &room) == 2);
    cr_expect(ids[0] == 65 && ids[1] == 255 && t.eot == 0 && t.vocab == 256);
    free(ids);
    tokenizer_free(&t);
}

Test(tokenizer, end_of_text_is_no_text) {
    Tokenizer t;
    load_small(&t);
    cr_expect(t.eot == 256 + NUM_SMALL_MERGES && t.vocab == t.eot + 1);
    int length;
    cr_expect(strcmp(tokenizer_decode(&t, t.eot, &length), "<|endoftext|>") == 0 && length == 13);
    tokenizer_decode(&t, t.vocab, &length);
    cr_expect(length == 0);
    tokenizer_decode(&t, -1, &length);
    cr_expect(length == 0);
    int32_t *ids = NULL;
    int64_t room = 0, count = tokenizer_encode(&t, "<|endoftext|>", 13, &ids, &room);
    cr_expect(count == 13, "%lld tokens", (long long)count);
    for (int64_t i = 0; i < count; i++) cr_expect(ids[i] != t.eot);
    free(ids);
    tokenizer_free(&t);
}

// A megabyte without a break: quadratic work would take hours.
Test(tokenizer, long_runs_take_bounded_work) {
    Tokenizer t;
    load_small(&t);
    int n = 1 << 20;
    char *s = tok_realloc(NULL, n, 1);
    int32_t *ids = NULL;
    int64_t room = 0;
    static const Bytes units[] = {T(" "), T("a"), T("ab"), T("\n"), T("\xff"), T("\xc3\xa9"), T("=-"), T("1"), T("\xe3\x80\x80")};
    for (size_t k = 0; k < sizeof(units) / sizeof(units[0]); k++) {
        for (int i = 0; i < n; i++) s[i] = units[k].s[i % units[k].n];
        clock_t start = clock();
        int64_t count = tokenizer_encode(&t, s, n, &ids, &room);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        cr_expect(seconds < 10, "unit %zu: %.1f s for a megabyte", k, seconds);
        expect_round_trip(&t, s, n, ids, count);
        if (k == 1) cr_expect(count == n / 4, "%lld tokens, expected all aaaa", (long long)count);
    }
    free(s);
    free(ids);
    tokenizer_free(&t);
}

// Cutting where tokenizer_safe_cut says gives the tokens of the uncut text.
Test(tokenizer, safe_cuts_change_nothing) {
    Tokenizer t;
    load_small(&t);
    int32_t *whole = NULL, *part = NULL;
    int64_t whole_room = 0, part_room = 0, cuts = 0;
    uint64_t state = 3;
    char s[80];
    for (int round = 0; round < 3000; round++) {
        int n = (int)(next_random(&state) % sizeof(s));
        random_text(s, n, &state);
        int64_t count = tokenizer_encode(&t, s, n, &whole, &whole_room);
        for (int seen = 1; seen <= n; seen++) {
            int64_t cut = tokenizer_safe_cut(s, seen);
            cr_assert(cut >= 0 && cut < seen);
            if (cut == 0) continue;
            int64_t left = tokenizer_encode(&t, s, cut, &part, &part_room);
            cr_assert(left <= count && memcmp(part, whole, (size_t)left * 4) == 0, "round %d: left of %lld", round, (long long)cut);
            int64_t right = tokenizer_encode(&t, s + cut, n - cut, &part, &part_room);
            cr_assert(left + right == count && memcmp(part, whole + left, (size_t)right * 4) == 0,
                      "round %d: right of %lld", round, (long long)cut);
            cuts++;
        }
    }
    cr_expect(cuts > 10000, "only %lld cuts were found", (long long)cuts);
    cr_expect(tokenizer_safe_cut("hello world", 11) == 5);
    cr_expect(tokenizer_safe_cut("\xe3\x80\x82\n", 4) == 3); // after an ideographic full stop
    cr_expect(tokenizer_safe_cut("\xe3\x80\x80\n", 4) == 0); // but not after an ideographic space
    cr_expect(tokenizer_safe_cut("hello", 5) == 0 && tokenizer_safe_cut(" a", 2) == 0 && tokenizer_safe_cut("", 0) == 0);
    free(whole);
    free(part);
    tokenizer_free(&t);
}

// -----------------------------------------------------------------------------
// The GPT-2 vocabulary and the sample

Test(tokenizer, gpt2_ids) {
    static const struct {
        const char *text;
        int n;
        int32_t ids[20];
    } cases[] = {
        {"hello world", 2, {31373, 995}},
        {"I'll say we've won, don't you?", 11, {40, 1183, 910, 356, 1053, 1839, 11, 836, 470, 345, 30}},
        {"na\xc3\xafve caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e", 10, {2616, 38776, 40304, 10545, 245, 98, 17312, 105, 45739, 252}},
        {"\xf0\x9f\x98\x80 \xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9", 8, {47249, 222, 50169, 101, 447, 235, 41840, 102}},
        {"a        b\n\n\n  c\t\td", 16, {64, 220, 220, 220, 220, 220, 220, 220, 275, 628, 198, 220, 269, 197, 197, 67}},
        {"<|endoftext|>", 7, {27, 91, 437, 1659, 5239, 91, 29}},
        {"x\xe3\x80\x80\xc2\xa0y\xe1\xa0\x8ez", 9, {87, 5099, 222, 1849, 88, 157, 254, 236, 89}},
        {"3.14159 12345678", 7, {18, 13, 1415, 19707, 17031, 2231, 30924}},
    };
    Tokenizer t;
    tokenizer_load(&t, shared_data("r50k_base.tiktoken"));
    cr_assert(t.vocab == 50257 && t.eot == 50256);
    int32_t *ids = NULL;
    int64_t room = 0;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int64_t count = tokenizer_encode(&t, cases[i].text, (int64_t)strlen(cases[i].text), &ids, &room);
        cr_expect(count == cases[i].n && memcmp(ids, cases[i].ids, (size_t)cases[i].n * 4) == 0, "%s", cases[i].text);
    }
    free(ids);
    tokenizer_free(&t);
}

Test(tokenizer, sample_has_217888_tokens) {
    Tokenizer t;
    tokenizer_load(&t, shared_data("r50k_base.tiktoken"));
    int64_t n;
    char *text = tok_read_file(shared_data("fineweb_edu_sample.txt"), &n);
    int32_t *ids = NULL;
    int64_t room = 0, count = tokenizer_encode(&t, text, n, &ids, &room);
    cr_expect(count == 217888, "%lld tokens", (long long)count);
    expect_round_trip(&t, text, n, ids, count);
    free(text);
    free(ids);
    tokenizer_free(&t);
}

// -----------------------------------------------------------------------------
// Faulty rank files

static void load(const void *path) {
    Tokenizer t;
    tokenizer_load(&t, path);
}

Test(tokenizer, faulty_rank_files) {
    static const struct {
        const char *content, *message;
    } cases[] = {
        {"", ":1: found 0 lines"},
        {"IQ== 0\nIg 1\n", ":2: found \"Ig\", expected the base64"},
        {"IQ== 0\nI*== 1\n", ":2: found \"I*==\", expected the base64"},
        {"I=== 0\n", ":1: found \"I===\", expected the base64"},
        {"IR== 0\n", ":1: found \"IR==\", expected the base64"}, // bits beyond the byte
        {" 0\n", ":1: found \"\", expected the base64"},
        {"IQ==\n", ":1: found \"IQ==\", expected base64, a space and a rank"},
        {"IQ== 0\n\nIg== 1\n", ":2: found \"\", expected base64, a space and a rank"},
        {"IQ== \n", ":1: found the rank \"\""},
        {"IQ== x\n", ":1: found the rank \"x\""},
        {"IQ== -1\n", ":1: found the rank \"-1\""},
        {"IQ== 00\n", ":1: found the rank \"00\""},
        {"IQ== 0 \n", ":1: found the rank \"0 \""},
        {"IQ==  0\n", ":1: found the rank \" 0\""},
        {"IQ== 0\r\n", ":1: found the rank \"0\\x0d\""},
        {"IQ== 18446744073709551616\n", ":1: found the rank \"18446744073709551616\""},
        {"IQ== 0\nIg== 2\n", ":2: found the rank \"2\", expected the ranks 0 to 1"}, // a gap
        {"IQ== 0\nIg== 0\n", ":2: found the rank 0 again"},
        {"IQ== 0\nIQ== 1\n", ":2: found the bytes of rank 0 again"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char part[256];
        snprintf(part, sizeof(part), "tokenizer: %s%s", in_folder("bad.tiktoken"), cases[i].message);
        expect_failure(load, write_text("bad.tiktoken", cases[i].content), part);
    }
    expect_failure(load, folder, "cannot read: Is a directory");
    expect_failure(load, in_folder("missing"), "missing: cannot open: No such file");
    char message[1024];
    const char *good = write_text("good.tiktoken", "Ig== 1\nIQ== 0"); // any order, no last newline
    cr_expect(run_child(load, good, message, sizeof(message)) == 0, "%s", message);
}

// -----------------------------------------------------------------------------
// Shards

Test(shard, round_trip) {
    ShardWriter w;
    const char *path = in_folder("x.bin");
    shard_open(&w, path, 1000);
    uint16_t tokens[5000];
    for (int i = 0; i < 5000; i++) tokens[i] = (uint16_t)(i % 1000);
    shard_append(&w, tokens, 1);
    shard_append(&w, NULL, 0);
    shard_append(&w, tokens + 1, 4999);
    cr_expect(access(path, F_OK) != 0, "the shard has its name before it is complete");
    char *temporary = strdup(w.temporary);
    cr_expect(access(temporary, F_OK) == 0);
    shard_close(&w);
    cr_expect(access(temporary, F_OK) != 0, "the temporary file stays");
    free(temporary);

    int64_t size;
    char *data = tok_read_file(path, &size);
    int32_t header[SHARD_HEADER_INTS];
    memcpy(header, data, sizeof(header));
    cr_expect(size == 1024 + 2 * 5000);
    cr_expect(header[0] == 20240520 && header[1] == 1 && header[2] == 5000 && header[3] == 1000);
    for (int i = 4; i < 256; i++) cr_expect(header[i] == 0);
    cr_expect(memcmp(data + 1024, tokens, sizeof(tokens)) == 0);
    free(data);

    uint16_t *back;
    cr_assert(shard_read(path, 1000, &back) == 5000);
    cr_expect(memcmp(back, tokens, sizeof(tokens)) == 0);
    free(back);
}

static void write_too_large_id(const void *path) {
    ShardWriter w;
    shard_open(&w, path, 100);
    uint16_t tokens[2] = {99, 100};
    shard_append(&w, tokens, 2);
}
static void open_too_large_vocab(const void *path) {
    ShardWriter w;
    shard_open(&w, path, 65537);
}
static void leave_early(const void *path) {
    ShardWriter a, b;
    shard_open(&a, path, 0);
    shard_open(&b, in_folder("second.bin"), 0);
    shard_finish(&a);
    tok_fail("test", "left early");
}
static void open_shard(const void *path) {
    ShardWriter w;
    shard_open(&w, path, 0);
}

static int count_entries(const char *path) {
    char command[PATH_MAX + 32], answer[32] = "";
    snprintf(command, sizeof(command), "ls -A '%s' | wc -l", path);
    FILE *p = popen(command, "r");
    cr_assert(p && fgets(answer, sizeof(answer), p) && pclose(p) == 0);
    return atoi(answer);
}

Test(shard, failures_leave_nothing) {
    expect_failure(write_too_large_id, in_folder("x.bin"), "x.bin: found token 100 at 1, expected ids below the vocabulary size 100");
    expect_failure(open_too_large_vocab, in_folder("x.bin"), "x.bin: found a vocabulary of 65537, expected at most 65536");
    expect_failure(leave_early, in_folder("x.bin"), "left early");
    expect_failure(open_shard, in_folder("no/x.bin"), "cannot create: No such file");
    cr_expect(count_entries(folder) == 0, "%d files left over", count_entries(folder));
}

static void read_shard_of_100(const void *path) {
    uint16_t *tokens;
    shard_read(path, 100, &tokens);
}

Test(shard, faulty_shards) {
    static const struct {
        int32_t magic, version, tokens, vocab;
        int bytes, token;
        const char *message;
    } cases[] = {
        {SHARD_MAGIC, 1, 2, 100, 1023, 0, "found 1023 bytes, expected a header of 1024"},
        {20240521, 1, 2, 100, 1028, 0, "found magic 20240521 version 1"},
        {SHARD_MAGIC, 2, 2, 100, 1028, 0, "found magic 20240520 version 2"},
        {SHARD_MAGIC, 1, 2, 100, 1027, 0, "found 1027 bytes, expected 1028"},
        {SHARD_MAGIC, 1, 2, 100, 1029, 0, "found 1029 bytes, expected 1028"},
        {SHARD_MAGIC, 1, -1, 100, 1022, 0, "found 1022 bytes, expected a header"},
        {SHARD_MAGIC, 1, -1, 100, 1024, 0, "expected 1022 for the -1 tokens"},
        {SHARD_MAGIC, 1, 2, 99, 1028, 0, "found a vocabulary of 99, expected 100"},
        {SHARD_MAGIC, 1, 2, 0, 1028, 100, "found token 100 at 1"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char data[1100] = {0};
        int32_t header[4] = {cases[i].magic, cases[i].version, cases[i].tokens, cases[i].vocab};
        uint16_t token = (uint16_t)cases[i].token;
        memcpy(data, header, sizeof(header));
        memcpy(data + 1026, &token, 2);
        expect_failure(read_shard_of_100, write_file("bad.bin", data, (size_t)cases[i].bytes), cases[i].message);
    }
    expect_failure(read_shard_of_100, folder, "found no regular file");
    expect_failure(read_shard_of_100, in_folder("missing"), "missing: cannot open");
}

// -----------------------------------------------------------------------------
// The program

// Runs data/tokenize with the arguments in a shell whose current folder is the
// test's; its output goes to the files out and err there. Returns the exit status.
static int tokenize(const char *arguments) {
    const char *program = getenv("TOKENIZE");
    char *full = realpath(program ? program : "data/tokenize", NULL);
    cr_assert(full, "no program %s: build it first", program ? program : "data/tokenize");
    char command[2 * PATH_MAX];
    snprintf(command, sizeof(command), "cd '%s' && P='%s'; (%s%s) >out 2>err", folder, full,
             strstr(arguments, "$P") ? "" : "\"$P\" ", arguments);
    free(full);
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Runs the program and checks its status, and that err is one line with part in it
// (or, for NULL, empty).
static void expect_run(const char *arguments, int expected, const char *part) {
    int status = tokenize(arguments);
    char *err = read_text("err"), *newline = strchr(err, '\n');
    cr_expect(status == expected, "tokenize %s: status %d, expected %d; %s", arguments, status, expected, err);
    if (part) cr_expect(strstr(err, part) && newline && newline[1] == 0, "tokenize %s: %s expected: %s", arguments, err, part);
    else cr_expect(!*err, "tokenize %s: %s", arguments, err);
    free(err);
}

static void expect_output(const char *expected) {
    char *out = read_text("out");
    cr_expect(strcmp(out, expected) == 0, "output: %s\nexpected: %s", out, expected);
    free(out);
}

static void expect_output_has(const char *part) {
    char *out = read_text("out");
    cr_expect(strstr(out, part), "output: %s\nexpected in it: %s", out, part);
    free(out);
}

Test(program, usage_errors) {
    static const char *cases[][2] = {
        {"", "found no vocabulary"},
        {"--bytes a.txt", "found no --out"},
        {"--bytes --out d", "found no INPUT"},
        {"--byte --out d a.txt", "unknown option --byte, did you mean --bytes?"},
        {"--bytes --shard-token=5 a.txt", "unknown option --shard-token, did you mean --shard-tokens?"},
        {"--bytes --frobnicate a.txt", "unknown option --frobnicate (see"},
        {"-v", "unknown option -v (see"},
        {"--bytes --ranks r --out d a.txt", "--bytes: found with --ranks"},
        {"--bytes a.txt --out", "--out: found no value, expected DIR"},
        {"--bytes --out= a.txt", "--out: found an empty value"},
        {"--bytes=1 --out d a.txt", "--bytes: found the value 1, expected none"},
        {"--bytes --bytes --out d a.txt", "--bytes: found twice"},
        {"--bytes --out d --shard-tokens x a.txt", "--shard-tokens: found x, expected a whole number from 1 to 2147483647"},
        {"--bytes --out d --shard-tokens 0 a.txt", "--shard-tokens: found 0"},
        {"--bytes --out d --shard-tokens 1e6 a.txt", "--shard-tokens: found 1e6"},
        {"--bytes --out d --shard-tokens 99999999999999999999 a.txt", "--shard-tokens: found 99999999999999999999"},
        {"--bytes --out d --val-tokens -1 a.txt", "--val-tokens: found -1"},
        {"--bytes --out d --val-tokens '' a.txt", "--val-tokens: found , expected"},
        {"--bytes --out d --val-tokens 11 --shard-tokens 10 a.txt", "--val-tokens: found 11, expected at most the 10"},
        {"--bytes --out d --name x/y a.txt", "--name: found x/y"},
        {"--bytes --out d --format json a.txt", "--format: found json"},
        {"--bytes --out d a.json", "a.json: found the suffix .json, expected .txt or .jsonl"},
        {"--bytes --out d.txt/x ./a", "./a: found the suffix \"\""},
        {"--bytes --out d - -", "-: found standard input twice"},
        {"--bytes --print --decode a.txt", "--print: found with --decode"},
        {"--bytes --print --out d a.txt", "--out: has no meaning with --print"},
        {"--bytes --decode --val-tokens 1 a.bin", "--val-tokens: has no meaning with --decode"},
        {"--bytes --decode -", "-: found standard input"},
    };
    write_text("a.txt", "some text");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) expect_run(cases[i][0], 2, cases[i][1]);
    cr_expect(access(in_folder("d"), F_OK) != 0, "a refused command line made a folder");
    expect_run("--help", 0, NULL);
    expect_output_has("--shard-tokens N");
}

Test(program, runtime_errors_leave_no_file) {
    static const char *cases[][2] = {
        {"missing.txt", "missing.txt: cannot open"},
        {"a.txt missing.txt", "missing.txt: cannot open"},
        {"folder.txt", "folder.txt: cannot read: Is a directory"},
        {"nul.txt", "nul.txt:2: found a byte 0"},
        {"empty.txt", "found no text"},
        {"--val-tokens 100 a.txt", "found 10 tokens, expected more than the 100 of --val-tokens"},
        {"bad.jsonl", "bad.jsonl:2: found no JSON object (near column 11)"},
        {"array.jsonl", "array.jsonl:1: found no JSON object"},
        {"two.jsonl", "two.jsonl:1: found no JSON object (near column 15)"},
        {"blank.jsonl", "blank.jsonl:2: found no JSON object"},
        {"key.jsonl", "key.jsonl:1: found no such key, expected \"text\""},
        {"number.jsonl", "number.jsonl:1: found a value that is no string"},
        {"zero.jsonl", "zero.jsonl:1: found a NUL character"},
    };
    write_text("a.txt", "some text");
    write_text("empty.txt", "");
    write_file("nul.txt", "ab\nc\0d", 6);
    cr_assert(mkdir(in_folder("folder.txt"), 0777) == 0);
    write_text("bad.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"\n");
    write_text("array.jsonl", "[1]\n");
    write_text("two.jsonl", "{\"text\":\"a\"}  {\"text\":\"b\"}\n");
    write_text("blank.jsonl", "{\"text\":\"a\"}\n\n{\"text\":\"b\"}\n");
    write_text("key.jsonl", "{\"Text\":\"a\"}\n");
    write_text("number.jsonl", "{\"text\":5}\n");
    write_text("zero.jsonl", "{\"text\":\"a\\u0000b\"}\n");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char arguments[256];
        snprintf(arguments, sizeof(arguments), "--bytes --out d --shard-tokens 2 --val-tokens 0 %s", cases[i][0]);
        if (strstr(cases[i][0], "--val-tokens")) snprintf(arguments, sizeof(arguments), "--bytes --out d %s", cases[i][0]);
        expect_run(arguments, 1, cases[i][1]);
        if (access(in_folder("d"), F_OK) == 0) cr_expect(count_entries(in_folder("d")) == 0, "%s left a file", cases[i][0]);
    }
    expect_run("--bytes --out a.txt a.txt", 1, "a.txt: cannot open: Not a directory");
    expect_run("--ranks a.txt --out d a.txt", 1, "tokenizer: a.txt:1: found the rank \"text\", expected the ranks 0 to 0");
    expect_run("--bytes --decode a.txt", 1, "shard: a.txt: found 9 bytes");
    expect_run("\"$P\" --bytes --print a.txt >/dev/full", 1, "standard output: cannot write");
}

// Every token of the text is in exactly one shard, in order, and the text comes back.
Test(program, text_to_shards_and_back) {
    write_ranks("r", small_merges, NUM_SMALL_MERGES);
    write_text("a.txt", "hello world, he's here\n\n  aabab\xff\xc3\xa9 <|endoftext|>");
    write_text("b.txt", "aaaa");
    expect_run("--ranks r --print a.txt b.txt", 0, NULL);
    char *printed = read_text("out");
    expect_run("--ranks r --out d --name n --val-tokens 7 --shard-tokens 10 a.txt b.txt", 0, NULL);
    expect_output_has(" in 2 documents, + 2 end-of-text = ");
    expect_output_has("d/n_val_000000.bin: 7 tokens\nd/n_train_000001.bin: 10 tokens\n");

    int eot = 256 + NUM_SMALL_MERGES;
    char again[4096] = "";
    size_t used = 0;
    for (int i = 0, documents = 0; i < 9; i++) {
        char name[64];
        snprintf(name, sizeof(name), i ? "d/n_train_%06d.bin" : "d/n_val_%06d.bin", i);
        if (access(in_folder(name), F_OK) != 0) {
            cr_expect(i > 3 && documents == 2, "%d shards, %d documents", i, documents);
            break;
        }
        uint16_t *tokens;
        int64_t n = shard_read(in_folder(name), eot + 1, &tokens);
        if (i == 0) cr_expect(tokens[0] == eot, "the first token is %d, expected end-of-text", tokens[0]);
        for (int64_t k = 0; k < n; k++) {
            if (tokens[k] != eot) used += (size_t)sprintf(again + used, "%s%d", used && again[used - 1] != '\n' ? " " : "", tokens[k]);
            else if (documents++) used += (size_t)sprintf(again + used, "\n");
        }
        free(tokens);
    }
    strcat(again, "\n");
    cr_expect(strcmp(again, printed) == 0, "shards: %s\nprinted: %s", again, printed);
    free(printed);
    expect_run("\"$P\" --ranks r --decode d/n_val*.bin d/n_train*.bin >text && cat a.txt b.txt | cmp - text", 0, NULL);
}

// However little is read at a time, the tokens are the same.
Test(program, chunk_size_changes_nothing) {
    write_ranks("r", small_merges, NUM_SMALL_MERGES);
    char text[20000];
    uint64_t state = 4;
    random_text(text, sizeof(text), &state);
    write_file("a.txt", text, sizeof(text));
    expect_run("\"$P\" --ranks r --print a.txt >whole", 0, NULL);
    static const int sizes[] = {1, 2, 3, 7, 64, 1000, 19999, 20000, 20001};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        char command[256];
        snprintf(command, sizeof(command), "\"$P\" --ranks r --print --chunk-bytes %d a.txt >part && cmp whole part", sizes[i]);
        expect_run(command, 0, NULL);
        snprintf(command, sizeof(command), "cat a.txt | \"$P\" --ranks r --print --chunk-bytes %d - >part && cmp whole part", sizes[i]);
        expect_run(command, 0, NULL);
    }
}

Test(program, jsonl) {
    write_text("a.jsonl", "{\"id\":1,\"text\":\"ab\\n\\u00e9\\\\u0000\"}\r\n{\"text\":\"\",\"body\":\"z\"}\n {\"text\":\"c\", \"body\":\"y\"} ");
    for (int chunk = 1; chunk < 100; chunk += 7) {
        char arguments[128];
        snprintf(arguments, sizeof(arguments), "--bytes --print --chunk-bytes %d a.jsonl", chunk);
        expect_run(arguments, 0, NULL);
        expect_output("97 98 10 195 169 92 117 48 48 48 48\n\n99\n");
    }
    expect_run("tail -n 2 a.jsonl | \"$P\" --bytes --print --format jsonl --jsonl-field body -", 0, NULL);
    expect_output("122\n121\n");
    expect_run("--bytes --print --format txt a.jsonl", 0, NULL);
    expect_output_has("123 34 105 100");
    expect_run("--bytes --out d --val-tokens 0 a.jsonl", 0, NULL);
    expect_output("d/tokens_train_000001.bin: 15 tokens\n"
                  "12 tokens of text in 3 documents, + 3 end-of-text = 15 tokens, vocabulary 256\n");
    uint16_t *tokens;
    cr_assert(shard_read(in_folder("d/tokens_train_000001.bin"), 256, &tokens) == 15);
    cr_expect(tokens[0] == 0 && tokens[12] == 0 && tokens[13] == 0 && tokens[14] == 99);
    free(tokens);
}

// Old shards of the same name are not mixed with new ones, nor lost to a failure.
Test(program, existing_shards) {
    write_text("a.txt", "0123456789");
    write_text("bad.jsonl", "{");
    expect_run("--bytes --out d --shard-tokens 2 --val-tokens 2 a.txt", 0, NULL);
    cr_expect(count_entries(in_folder("d")) == 6);
    expect_run("--bytes --out d --shard-tokens 9 --val-tokens 2 a.txt", 1, "found shards of this name, expected none; --overwrite replaces them");
    expect_run("--bytes --out d --overwrite bad.jsonl", 1, "bad.jsonl:1: found no JSON");
    cr_expect(count_entries(in_folder("d")) == 6, "a failed run removed the old shards");
    expect_run("--bytes --out d --name other --shard-tokens 9 --val-tokens 2 a.txt", 0, NULL);
    expect_run("--bytes --out d --overwrite --shard-tokens 9 --val-tokens 2 a.txt", 0, NULL);
    cr_expect(count_entries(in_folder("d")) == 4, "%d shards, expected 2 of each name", count_entries(in_folder("d")));
    expect_run("--bytes --decode d/tokens_val_000000.bin d/tokens_train_000001.bin", 0, NULL);
    expect_output("0123456789");
}

Test(program, signal_leaves_nothing) {
    write_text("a.txt", "some text");
    expect_run("mkfifo f; (cat a.txt; exec sleep 20) >f & s=$!; \"$P\" --bytes --out d --shard-tokens 2 --val-tokens 0 --chunk-bytes 1 - <f & "
               "p=$!; while ! ls d/*.tmp >ls 2>&1; do sleep 0.05; done; kill -TERM $p; wait $p; r=$?; kill $s; exit $r",
               143, "tokenize: stopped by signal 15, nothing written");
    cr_expect(count_entries(in_folder("d")) == 0, "%d files left over", count_entries(in_folder("d")));
}

Test(program, vocabulary_too_large) {
    FILE *f = fopen(in_folder("large.tiktoken"), "wb");
    cr_assert(f);
    for (int i = 0; i < 65536; i++) {
        char token[3] = {'x', (char)(i >> 8), (char)i};
        put_base64(f, token, 3);
        fprintf(f, " %d\n", i);
    }
    cr_assert(fclose(f) == 0);
    write_text("a.txt", "x");
    expect_run("--ranks large.tiktoken --out d a.txt", 1, "found a vocabulary of 65537, expected at most 65536");
}

Test(program, sample) {
    char arguments[2 * PATH_MAX];
    char *ranks = realpath(shared_data("r50k_base.tiktoken"), NULL), *text = realpath(shared_data("fineweb_edu_sample.txt"), NULL);
    snprintf(arguments, sizeof(arguments), "--ranks '%s' --out d '%s'", ranks, text);
    expect_run(arguments, 0, NULL);
    expect_output("d/tokens_val_000000.bin: 32768 tokens\nd/tokens_train_000001.bin: 185121 tokens\n"
                  "217888 tokens of text in 1 document, + 1 end-of-text = 217889 tokens, vocabulary 50257\n");
    snprintf(arguments, sizeof(arguments), "\"$P\" --ranks '%s' --decode d/*val* d/*train* | cmp - '%s'", ranks, text);
    expect_run(arguments, 0, NULL);
    snprintf(arguments, sizeof(arguments), "printf 'hello world' | \"$P\" --ranks '%s' --print -", ranks);
    expect_run(arguments, 0, NULL);
    expect_output("31373 995\n");
    free(ranks);
    free(text);
}
