// test_synth.c: is the made-up corpus what data/synth.c says it is?
//
//   cc -O1 -std=gnu11 -Wall -Wextra dev/test/test_synth.c -o test_synth -lcriterion -lm
//
// Under AddressSanitizer add -lpcre2-8 and run with ASAN_OPTIONS=detect_leaks=0:
// the leak checker trips over the children that the tests fork.
#define TESTING
#include "../../data/synth.c"

#include <criterion/criterion.h>
#include <ctype.h>
#include <strings.h>
#include <sys/wait.h>

enum { VOCAB_SIZE = 1024, MANY = 3000 }; // stories a test looks at

static Language lang;
static char folder[64];

static void setup(void) {
    if (!lang.vocab) language_build(&lang, VOCAB_SIZE);
    strcpy(folder, "/tmp/test_synth_XXXXXX");
    cr_assert(mkdtemp(folder));
}

static void teardown(void) {
    char command[96];
    snprintf(command, sizeof(command), "rm -r %s", folder);
    cr_assert(system(command) == 0);
}

TestSuite(synth, .init = setup, .fini = teardown);

// Runs the program; returns its exit status and what it printed on stderr.
static int run(char *error, size_t room, const char *const *args) {
    const char *argv[32] = {"synth"};
    int argc = 1, fds[2];
    while (args[argc - 1]) argv[argc] = args[argc - 1], argc++;
    cr_assert(pipe(fds) == 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(fds[1], 2);
        if (!freopen("/dev/null", "w", stdout)) _exit(99);
        exit(synth_main(argc, (char **)argv));
    }
    close(fds[1]);
    size_t n = 0;
    for (ssize_t got; n < room - 1 && (got = read(fds[0], error + n, room - 1 - n)) > 0;) n += (size_t)got;
    error[n] = 0;
    close(fds[0]);
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
#define RUN(error, ...) run(error, sizeof(error), (const char *const[]){__VA_ARGS__, NULL})

static unsigned char *slurp(const char *dir, const char *name, size_t *size) {
    char path[1024];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    unsigned char *bytes = malloc(1 << 22);
    *size = fread(bytes, 1, 1 << 22, f);
    fclose(f);
    return bytes;
}

static int files_in(const char *dir) { // regular names only
    char command[128];
    int n = -1;
    snprintf(command, sizeof(command), "ls -A %s | wc -l", dir);
    FILE *p = popen(command, "r");
    cr_assert(p && fscanf(p, "%d", &n) == 1);
    pclose(p);
    return n;
}

// ---------------------------------------------------------------------------
// Entropy

Test(synth, text_costs_what_the_expectation_says) {
    Mean perfect = perfect_score(&lang);
    double rate = perfect.nats / perfect.tokens;
    Author author = author_make(11, 0);
    Story story = {0};
    double nats = 0, tokens = 0, squares = 0, stories = 0, squares_of_length = 0;
    while (tokens < 1e6) {
        author.nats = 0;
        write_story(&lang, &story, &author);
        double n = (double)story.n, e = author.nats - rate * n;
        nats += author.nats, tokens += n, squares += e * e, stories++;
        squares_of_length += (n - perfect.tokens) * (n - perfect.tokens);
    }
    double error = sqrt(squares) / tokens, length_error = sqrt(squares_of_length) / stories;
    cr_expect(fabs(nats / tokens - rate) < 4 * error, "found %.5f, expected %.5f +- %.5f", nats / tokens, rate, error);
    cr_expect(error < 0.004, "the test has lost its power: standard error %.5f", error);
    cr_expect(fabs(tokens / stories - perfect.tokens) < 4 * length_error, "length %.3f, expected %.3f", tokens / stories,
              perfect.tokens);
    free(story.tokens);
}

// All derivations of a story, by exhaustive search: what is still to be matched
// is a list of rules, each with the step it has come to.
typedef struct Rest { const Rule *rule; int step, number; const struct Rest *then; } Rest;
static struct { const Story *story; int topic, gender, memory[CLASSES], found; double nats; } search;

static void match(const Rest *rest, int64_t at, double nats) {
    if (!rest) {
        if (at == search.story->n) search.found++, search.nats = nats;
        return;
    }
    if (rest->step == rest->rule->n) { match(rest->then, at, nats); return; }
    const Step *step = &rest->rule->steps[rest->step];
    Rest next = {rest->rule, rest->step + 1, rest->number, rest->then};
    int number = step->number < 0 ? rest->number : step->number;
    if (step->kind == EXPAND) {
        const Symbol *s = &lang.symbols[step->index];
        for (int r = 0; r < s->n; r++) {
            Rest inner = {&lang.rules[s->first + r], 0, number, &next};
            match(&inner, at, nats + s->dist.nats[r]);
        }
        return;
    }
    if (at == search.story->n) return;
    uint16_t token = search.story->tokens[at];
    if (step->kind == LITERAL) {
        if (token == step->form[step->by_gender ? search.gender : number]) match(&next, at + 1, nats);
        return;
    }
    const Class *c = &lang.classes[step->index];
    int *memory = &search.memory[step->index], before = *memory;
    if (step->kind == RECALL) {
        if (token == c->words[before].form[number]) match(&next, at + 1, nats);
        return;
    }
    const Dist *d = &c->dist[column_now(step->index, search.topic, search.gender)];
    for (int i = 0; i < c->n; i++)
        if (token == c->words[i].form[number] && isfinite(d->nats[i])) {
            *memory = i;
            match(&next, at + 1, nats + d->nats[i]);
            *memory = before;
        }
}

// This is what makes H(text) = H(choices).
Test(synth, every_story_has_one_derivation_and_its_price) {
    Author author = author_make(12, 0);
    Story story = {0};
    for (int i = 0; i < MANY; i++) {
        author.nats = 0;
        write_story(&lang, &story, &author);
        memset(&search, 0, sizeof(search));
        search.story = &story;
        for (int t = 0; t < TOPICS; t++)
            for (int g = 0; g < GENDERS; g++) {
                search.topic = t, search.gender = g;
                Rest start = {&lang.rules[0], 0, SINGULAR, NULL};
                match(&start, 1, lang.topic.nats[t] + lang.gender.nats[g] + lang.symbols[0].dist.nats[0]);
            }
        cr_assert(search.found == 1, "story %d has %d derivations", i, search.found);
        cr_assert(fabs(search.nats - author.nats) < 1e-9, "story %d: %f against %f", i, search.nats, author.nats);
    }
    free(story.tokens);
}

Test(synth, chances_add_up_and_choose_follows_them) {
    uint64_t weight[] = {3, 0, 5, 1, 7};
    Dist d = dist_make(weight, 5);
    Author author = author_make(13, 0);
    int count[5] = {0}, draws = 160000;
    for (int i = 0; i < draws; i++) count[choose(&d, &author)]++;
    double h = 0;
    for (int i = 0; i < 5; i++) {
        double p = (double)weight[i] / 16, sd = sqrt(draws * p * (1 - p));
        cr_expect(fabs(count[i] - draws * p) <= 5 * sd, "option %d: %d draws", i, count[i]);
        if (p > 0) h -= p * log(p);
    }
    cr_expect(fabs(d.entropy - h) < 1e-12);
    cr_expect(fabs(author.nats / draws - h) < 0.01);
}

// ---------------------------------------------------------------------------
// Agreement, read back from the text by a parser that knows word classes only

static struct { char *word[512]; int n, at; const char *problem; } reader;

static const char *word(void) { return reader.at < reader.n ? reader.word[reader.at] : ""; }
static int is(const char *w) { return !strcmp(word(), w); }
static int take(const char *w) { return is(w) ? (reader.at++, 1) : 0; }
static int problem(const char *what) { if (!reader.problem) reader.problem = what; return -1; }

// Takes a word of a class; returns a mask, bit 0: singular form, bit 1: plural form.
static int take_class(int class) {
    const Class *c = &lang.classes[class];
    for (int i = 0; i < c->n; i++) {
        int mask = 0;
        for (int f = 0; f < 2; f++)
            if (!strcmp(lang.text[c->words[i].form[f]] + 1, word())) mask |= 1 << f;
        if (mask) return reader.at++, mask;
    }
    return 0;
}

static int noun_phrase(void);

static void object(void) {
    if (!take_class(HERO) && noun_phrase() < 0) problem("no object");
}

static int head(void) {
    take_class(ADJ);
    int n = take_class(NOUN);
    return n ? n : problem("no noun");
}

static void relative_clause(int number) {
    int subject = number, gap_is_object = 1;
    if (take("the")) subject = head();
    else if (take_class(HERO)) subject = 1;
    else gap_is_object = 0;
    int verb = take_class(VT), transitive = verb != 0;
    if (!verb) verb = take_class(VI);
    if (verb != subject) problem("the verb of a relative clause disagrees");
    if (gap_is_object && !transitive) problem("an object is missing its verb");
    if (transitive && !gap_is_object) object();
}

static int noun_phrase(void) {
    static const struct { const char *word; int number; } determiner[] = {
        {"the", 3}, {"this", 1}, {"these", 2}, {"every", 1}, {"many", 2}, {"one", 1}, {"some", 2}};
    int allowed = 0;
    for (int i = 0; i < 7; i++)
        if (!strcasecmp(word(), determiner[i].word)) allowed = determiner[i].number;
    if (!allowed) return -1;
    reader.at++;
    int number = head();
    if (!(number & allowed)) problem("determiner and noun disagree");
    if (take("near") || take("behind") || take("beside") || take("below") || take("above")) {
        if (!take("the")) problem("no 'the' after a preposition");
        if (!take_class(PLACE)) head();
    } else if (take("that")) {
        relative_clause(number);
    }
    return number;
}

static void verb_phrase(int number) {
    static const char *be[] = {"is", "are"}, *act[] = {"does", "do"};
    for (int n = 1; n <= 2; n++) {
        if (take(be[n - 1])) {
            if (n != number) problem("is/are disagrees");
            int as = take("as");
            if (!take_class(ADJ)) problem("no adjective");
            if (as && (!take("as") || take_class(NOUN) != 2)) problem("no comparison");
            return;
        }
        if (take(act[n - 1])) {
            if (n != number) problem("do/does disagrees");
            if (!take("not")) problem("no 'not'");
            if (take_class(VI) == 2) return;
            if (take_class(VT) != 2) problem("no base form after do");
            object();
            return;
        }
    }
    int verb = take_class(VT);
    if (verb) {
        if (verb != number) problem("transitive verb disagrees");
        object();
    } else {
        if (take_class(VI) != number) problem("intransitive verb disagrees");
        if (take("because")) number = noun_phrase(), verb_phrase(number);
        else take_class(ADV);
    }
}

// Splits text at spaces and before punctuation; words point into text's copy.
static void read_sentence(char *text) {
    for (int i = 0; i < reader.n; i++) free(reader.word[i]);
    memset(&reader, 0, sizeof(reader));
    while (*text) {
        text += *text == ' ';
        size_t n = strcspn(text, " ,.");
        if (!n) n = 1;
        if (*text) reader.word[reader.n++] = strndup(text, n);
        text += *text ? n : 0;
    }
}

static void check_sentence(void) {
    int number;
    if (take("At")) {
        reader.at++; // dawn, noon, ...
        number = noun_phrase();
    } else if (take("When")) {
        int early = noun_phrase();
        if (take_class(VI) != early) problem("verb after 'when' disagrees");
        if (!take(",")) problem("no comma");
        number = noun_phrase();
    } else if (take_class(HERO)) {
        number = take("and") ? (take_class(HERO) ? 2 : problem("no second name")) : 1;
        if (take("the")) take_class(KIND);
    } else if (take("She") || take("He")) {
        number = 1;
    } else {
        number = noun_phrase();
    }
    if (number < 0) problem("no subject");
    if (take("looks") || take("walks") || take("asks")) return; // the hero's errands
    verb_phrase(number);
    if (!take(".") || reader.at != reader.n) problem("words left over");
}

static void decode(const Story *story, char *out, size_t room) {
    size_t n = 0;
    for (int64_t i = 1; i < story->n; i++) {
        cr_assert(story->tokens[i] < lang.tokens, "token %d at %lld is no word", story->tokens[i], (long long)i);
        n += (size_t)snprintf(out + n, room - n, "%s", lang.text[story->tokens[i]]);
        cr_assert(n < room);
    }
}

Test(synth, every_sentence_agrees) {
    Author author = author_make(14, 0);
    Story story = {0};
    static char text[16384];
    int checked = 0;
    for (int i = 0; i < MANY; i++) {
        write_story(&lang, &story, &author);
        decode(&story, text, sizeof(text));
        int sentence = 0;
        for (char *p = text, *end; (end = strchr(p, '.')); p = end + 1, sentence++) {
            char kept = end[1];
            end[1] = 0;
            p += *p == ' ';
            int fixed = sentence < 3 || kept == 0 || strchr(p, '"'); // opening, ending, direct speech
            if (!fixed) {
                read_sentence(p);
                check_sentence();
                cr_assert(!reader.problem, "%s at word %d of: %s", reader.problem, reader.at, p);
                checked++;
            }
            end[1] = kept;
        }
    }
    cr_expect(checked > 4 * MANY, "only %d sentences checked", checked);
    free(story.tokens);
}

// ---------------------------------------------------------------------------
// Reference: who, where and what stay the same

static int class_has(int class, int token) {
    for (int i = 0; i < lang.classes[class].n; i++)
        if (lang.classes[class].words[i].form[SINGULAR] == token) return lang.classes[class].words[i].column + 1;
    return 0;
}

Test(synth, every_story_keeps_to_its_hero_place_and_treasure) {
    static const int once[] = {LOOK, SHINE, THING, PLACE};
    Author author = author_make(15, 0);
    Story story = {0};
    int mentions = 0;
    for (int i = 0; i < MANY; i++) {
        write_story(&lang, &story, &author);
        int hero = -1, friend = -1, gender = 0, seen[CLASSES] = {0}, kind_of[2] = {0};
        for (int64_t k = 1; k < story.n; k++) {
            int token = story.tokens[k], column = class_has(HERO, token);
            for (int c = 0; c < 4; c++)
                if (class_has(once[c], token)) {
                    cr_assert(!seen[once[c]] || seen[once[c]] == token, "story %d has two of %s", i, class_specs[once[c]].name);
                    seen[once[c]] = token, mentions++;
                }
            if (column) {
                if (hero < 0) hero = token, gender = column;
                else if (token != hero && friend < 0) friend = token;
                cr_assert(token != friend || column != gender, "story %d: hero and friend of one gender", i);
                cr_assert(token == hero || token == friend, "story %d has a third name, %s", i, lang.text[token]);
                // "Mira the fox", or "a fox called Mira"
                const char *after = k + 1 < story.n ? lang.text[story.tokens[k + 1]] : "";
                int kind = !strcmp(after, " the") ? story.tokens[k + 2] :
                           !strcmp(lang.text[story.tokens[k - 1]], " called") ? story.tokens[k - 2] : 0;
                int *known = &kind_of[token == friend];
                cr_assert(!kind || !*known || *known == kind, "story %d: %s changes kind", i, lang.text[token]);
                cr_assert(!kind || class_has(KIND, kind));
                if (kind) *known = kind;
            }
            // The hero's wish comes before any other pronoun can.
            if (friend < 0 && hero >= 0 && (!strcasecmp(lang.text[token], " she") || !strcasecmp(lang.text[token], " her")))
                cr_assert(gender == 1, "story %d: a boy called she", i);
            if (friend < 0 && hero >= 0 && (!strcasecmp(lang.text[token], " he") || !strcasecmp(lang.text[token], " his")))
                cr_assert(gender == 2, "story %d: a girl called he", i);
        }
        cr_assert(hero >= 0 && friend >= 0 && seen[PLACE] && seen[THING] && kind_of[0] && kind_of[1], "story %d lacks a part", i);
        cr_assert(class_has(PLACE, seen[PLACE]) == story.topic + 1 && gender == story.gender + 1);
    }
    cr_expect(mentions > 8 * MANY);
    free(story.tokens);
}

// ---------------------------------------------------------------------------
// Vocabulary

Test(synth, every_vocabulary_is_whole_and_every_text_decodes) {
    static Language languages[5]; // never freed, but not lost either
    const int sizes[] = {lang.english + 1, lang.english + 2, 777, 4096, 65536};
    static char text[16384];
    for (int i = 0; i < 5; i++) {
        const Language *other = &languages[i];
        language_build(&languages[i], sizes[i]);
        cr_assert(other->tokens == other->vocab - 1, "%d tokens in a vocabulary of %d", other->tokens, other->vocab);
        cr_assert(other->english == lang.english);
        Author author = author_make(16, 0);
        Story story = {0};
        for (int k = 0; k < 500; k++) {
            write_story(other, &story, &author);
            cr_assert(story.tokens[0] == other->vocab - 1 && story.n < 1024);
            size_t n = 0;
            for (int64_t t = 1; t < story.n; t++) {
                cr_assert(story.tokens[t] < other->tokens);
                n += (size_t)snprintf(text + n, sizeof(text) - n, "%s", other->text[story.tokens[t]]);
            }
            cr_assert(isupper((unsigned char)text[0]) && !strstr(text, "  "), "%s", text);
            cr_assert(!strstr(text, " ,") && !strstr(text, " .") && !strstr(text, " ?"), "%s", text);
            // The GPT-2 way to cut text, ` ?letters| ?others`, must cut it into these tokens again.
            const char *p = text;
            for (int64_t t = 1; t < story.n; t++) {
                size_t length = *p == ' ';
                int letters = isalpha((unsigned char)p[length]) != 0;
                while (p[length] && p[length] != ' ' && (isalpha((unsigned char)p[length]) != 0) == letters) length++;
                const char *token = other->text[story.tokens[t]];
                cr_assert(strlen(token) == length && !strncmp(token, p, length), "cut at \"%.12s\", token \"%s\"", p, token);
                p += length;
            }
        }
        free(story.tokens);
    }
}

static int compare_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

Test(synth, no_two_tokens_are_the_same_word) {
    static Language big;
    language_build(&big, 65536);
    char **sorted = malloc((size_t)big.tokens * sizeof(char *));
    memcpy(sorted, big.text, (size_t)big.tokens * sizeof(char *));
    qsort(sorted, (size_t)big.tokens, sizeof(char *), compare_text);
    for (int i = 1; i < big.tokens; i++) cr_assert(strcmp(sorted[i - 1], sorted[i]), "twice: %s", sorted[i]);
    free(sorted);
    static int owner[65536]; // nor does one token belong to two classes
    for (int c = 0; c < CLASSES; c++)
        for (int i = 0; c != FRIEND && c != KIND2 && i < big.classes[c].n; i++)
            for (int f = 0; f < 2; f++) {
                const uint16_t *form = big.classes[c].words[i].form;
                int t = form[f];
                cr_assert(!owner[t] || (owner[t] == c + 1 && f == 1 && class_specs[c].inflection == PLAIN),
                          "%s is in %s and in %s", big.text[t], class_specs[c].name, class_specs[owner[t] - 1].name);
                owner[t] = c + 1;
                // Gulls are many; one gull sings.
                int longer = class_specs[c].inflection == NOUNS ? PLURAL : SINGULAR;
                cr_assert(class_specs[c].inflection == PLAIN || strlen(big.text[form[longer]]) > strlen(big.text[form[!longer]]),
                          "%s, %s", big.text[form[0]], big.text[form[1]]);
            }
}

Test(synth, ranks_are_the_vocabulary) {
    char error[512];
    size_t size;
    cr_assert(RUN(error, "--out", folder, "--tokens", "10", "--val-tokens", "10") == 0, "%s", error);
    char *ranks = (char *)slurp(folder, "synth.tiktoken", &size), *line = ranks;
    cr_assert(ranks);
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < VOCAB_SIZE - 1; i++) {
        char text[64] = "";
        int n = 0, bits = 0, have = 0;
        for (; *line != ' '; line++) {
            if (*line == '=') continue;
            bits = (bits << 6 | (int)(strchr(digit, *line) - digit)) & 0xFFFF, have += 6;
            if (have >= 8) text[n++] = (char)(bits >> (have -= 8));
        }
        cr_assert_str_eq(text, lang.text[i]);
        cr_assert(strtol(line + 1, &line, 10) == i && *line++ == '\n');
    }
    cr_expect(line == ranks + size);
    free(ranks);
}

// ---------------------------------------------------------------------------
// Files

static uint64_t fingerprint(const unsigned char *bytes, size_t n) { // FNV-1a
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ bytes[i]) * 0x100000001b3u;
    return h;
}

Test(synth, a_seed_gives_the_same_bytes_everywhere_and_another_seed_others) {
    char error[512], path[3][128];
    const char *seeds[] = {"7", "7", "8"};
    unsigned char *train[3], *val[3];
    size_t size[3];
    for (int i = 0; i < 3; i++) {
        snprintf(path[i], sizeof(path[i]), "%s/%d", folder, i);
        cr_assert(RUN(error, "--out", path[i], "--seed", seeds[i], "--tokens", "20000", "--val-tokens", "10000") == 0, "%s", error);
        train[i] = slurp(path[i], "synth_train_000001.bin", &size[i]);
        val[i] = slurp(path[i], "synth_val_000000.bin", &size[i]);
        cr_assert(train[i] && val[i] && size[i] == 1024 + 20000);
    }
    cr_expect(!memcmp(train[0], train[1], size[0]) && !memcmp(val[0], val[1], size[0]), "seed 7 differs from itself");
    cr_expect(memcmp(train[0], train[2], size[0]) && memcmp(val[0], val[2], size[0]), "seeds 7 and 8 are the same");
    cr_expect(memcmp(train[0], val[0], size[0]), "training and validation text are the same");
    cr_expect(fingerprint(train[0], size[0]) == UINT64_C(0x3795f7acd9b8d768), "found %llx: has the language changed on purpose?",
              (unsigned long long)fingerprint(train[0], size[0]));
    for (int i = 0; i < 3; i++) free(train[i]), free(val[i]);
}

Test(synth, shards_have_the_sizes_asked_for_and_join_to_one_stream) {
    char error[512], name[64];
    static uint16_t whole[10000];
    const char *counts[] = {"1", "3"};
    for (int which = 0; which < 2; which++) {
        const char *k = counts[which];
        cr_assert(RUN(error, "--out", folder, "--shards", k, "--tokens", "10000", "--val-tokens", "77") == 0);
        int n = atoi(k), at = 0;
        for (int i = 1; i <= n; i++) {
            size_t size;
            snprintf(name, sizeof(name), "synth_train_%06d.bin", i);
            unsigned char *bytes = slurp(folder, name, &size);
            cr_assert(bytes);
            int32_t header[4];
            memcpy(header, bytes, sizeof(header));
            int expected = 10000 / n + (i <= 10000 % n);
            cr_expect(header[0] == 20240520 && header[1] == 1 && header[2] == expected && header[3] == VOCAB_SIZE);
            cr_expect(size == 1024 + 2 * (size_t)expected, "%s has %zu bytes", name, size);
            if (n == 1) memcpy(whole, bytes + 1024, sizeof(whole));
            else cr_expect(!memcmp(whole + at, bytes + 1024, size - 1024), "shard %d does not carry on", i);
            at += expected;
            free(bytes);
        }
        cr_expect(at == 10000);
        cr_expect(files_in(folder) == n + 2);
    }
    // Fewer shards than before: the surplus must not linger and be read.
    cr_assert(RUN(error, "--out", folder, "--shards", "1", "--tokens", "100", "--val-tokens", "77") == 0);
    cr_expect(files_in(folder) == 3, "found %d files", files_in(folder));
}

Test(synth, a_folder_that_cannot_be_written_is_named_and_left_clean) {
    char error[512], path[128];
    snprintf(path, sizeof(path), "%s/no/such", folder);
    cr_expect(RUN(error, "--out", path) == 1);
    cr_expect(strstr(error, path) && strstr(error, "No such file"), "%s", error);
    snprintf(path, sizeof(path), "%s/file", folder);
    fclose(fopen(path, "w"));
    cr_expect(RUN(error, "--out", path) == 1);
    cr_expect(strstr(error, path) && strstr(error, "Not a directory"), "%s", error);
    // The vocabulary's name is taken by a folder: nothing at all may appear.
    snprintf(path, sizeof(path), "%s/file", folder), unlink(path);
    snprintf(path, sizeof(path), "%s/synth.tiktoken", folder), mkdir(path, 0777);
    cr_expect(RUN(error, "--out", folder, "--tokens", "1000") == 1);
    cr_expect(strstr(error, path) && strstr(error, "directory"), "%s", error);
    cr_expect(files_in(folder) == 1, "found %d files", files_in(folder));
}

Test(synth, bad_command_lines_are_explained) {
    static const struct { const char *args[4]; const char *says[3]; } bad[] = {
        {{"--token", "5"}, {"--token\"", "--tokens"}},
        {{"--sead", "5"}, {"--sead", "--seed"}},
        {{"stories"}, {"stories", "flag"}},
        {{"--tokens"}, {"--tokens", "nothing", "N"}},
        {{"--seed", "1", "--out"}, {"--out", "nothing", "DIR"}},
        {{"--out", ""}, {"--out", "0 bytes"}},
        {{"--tokens", "many"}, {"--tokens", "\"many\"", "whole number from 1"}},
        {{"--tokens", "10k"}, {"--tokens", "\"10k\""}},
        {{"--tokens", ""}, {"--tokens", "\"\""}},
        {{"--tokens", "0"}, {"--tokens", "\"0\"", "from 1"}},
        {{"--tokens", "-4"}, {"--tokens", "\"-4\""}},
        {{"--tokens", "99999999999999999999"}, {"--tokens", "whole number"}},
        {{"--val-tokens", "2147483648"}, {"--val-tokens", "2147483647"}},
        {{"--shards", "1001"}, {"--shards", "1000"}},
        {{"--shards", "3", "--tokens", "2"}, {"--shards", "found 3", "2 tokens"}},
        {{"--tokens", "9000000000"}, {"--shards", "9000000000", "2147483647"}},
        {{"--seed", "-1"}, {"--seed", "\"-1\"", "from 0"}},
        {{"--vocab", "65537"}, {"--vocab", "65536"}},
        {{"--vocab", "100"}, {"--vocab", "found 100", "at least"}},
        {{"--seed", "9223372036854775808"}, {"--seed", "9223372036854775807"}},
        {{"--seed", "1.5"}, {"--seed", "\"1.5\""}},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char error[512];
        const char *args[5] = {bad[i].args[0], bad[i].args[1], bad[i].args[2], bad[i].args[3], NULL};
        cr_expect(run(error, sizeof(error), args) == 2, "case %zu: %s", i, error);
        for (int k = 0; k < 3 && bad[i].says[k]; k++)
            cr_expect(strstr(error, bad[i].says[k]) != NULL, "case %zu lacks %s: %s", i, bad[i].says[k], error);
        cr_expect(strchr(error, '\n') == error + strlen(error) - 1, "case %zu is not one line: %s", i, error);
    }
    char error[512];
    cr_expect(RUN(error, "--help") == 0 && !error[0]);
    cr_expect(RUN(error, "--text", "--tokens", "100") == 0 && !error[0]);
}
