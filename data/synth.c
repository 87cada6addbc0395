// synth.c: a training corpus that needs no download, with a known perfect score.
//
// It writes little stories in a small English-like language. Every decision of
// the author is a draw from a known distribution, and a story shows which
// decisions were made, so the entropy of the text is the entropy of the draws:
// we can compute exactly the loss of a model that has learned everything there
// is to learn. What there is to learn:
//   - which words exist and how frequent they are (Zipf-like, so: a long tail)
//   - agreement: "The gulls near the old mill sing", "The gull that owls like sings"
//   - reference: hero, friend, place and treasure are drawn once, early in a
//     story; later sentences repeat them, and pronouns follow the hero's gender
//   - topic: the place tells which nouns, verbs and adjectives will be common
//
//   cc -O2 data/synth.c -o data/synth -lm    # at -O0 also -lpcre2-8
//   data/synth                       # writes data/synthetic/synth_*.bin and synth.tiktoken
//   data/synth --text --tokens 500   # just look at some stories
#include "tokenizer.h" // first: it asks for the POSIX calls

#include <ctype.h>
#include <math.h>

// ---------------------------------------------------------------------------
// Words. A class may lean: words in the column of the story's topic (or of the
// hero's gender) weigh `own`, the others `other`. 0 means: never drawn.

enum { HERO, FRIEND, KIND, KIND2, LOOK, SHINE, THING, PLACE, NOUN, VT, VI, ADJ, ADV, CLASSES };
enum { FLAT, BY_TOPIC, BY_GENDER, LEANS };
enum { PLAIN, NOUNS, VERBS }; // nouns add -s in the plural, verbs in the singular
enum { TOPICS = 6, GENDERS = 2, MAX_COLUMNS = 6, SINGULAR = 0, PLURAL = 1 };
static const int columns_of[LEANS] = {1, TOPICS, GENDERS};

typedef struct {
    const char *name;
    int lean, own, other, inflection;
    const char *words[MAX_COLUMNS]; // most frequent first
} ClassSpec;

// Columns of topics: the sea, the farm, the forest, the castle, the mountains, the town.
static const ClassSpec class_specs[CLASSES] = {
    [HERO] = {"HERO", BY_GENDER, 1, 0, PLAIN, {
        "Mira Clara Rosa Wren Anna Nora Luna Hazel Petra Freya Greta Maya Edith Ivy Juno Tilda",
        "Tobin Felix Hugo Milo Oscar Finn Otto Leo Jasper Emil Rowan Bruno Silas Arlo Theo Caspar"}},
    [FRIEND] = {"FRIEND", BY_GENDER, 0, 1, PLAIN, {0}}, // HERO's words, of the other gender
    [KIND] = {"KIND", FLAT, 1, 1, PLAIN, {"fox rabbit bear mouse cat badger frog wolf kitten mole hare dog"}},
    [KIND2] = {"KIND2", FLAT, 1, 1, PLAIN, {0}},           // KIND's words
    [LOOK] = {"LOOK", FLAT, 1, 1, PLAIN, {"old little crooked white tall quaint ruined haunted forgotten grand"}},
    [SHINE] = {"SHINE", FLAT, 1, 1, PLAIN, {"golden silver magic tiny broken glass secret shiny wooden painted"}},
    [THING] = {"THING", FLAT, 1, 1, PLAIN, {"key lantern ring bell map crown drum flute kite coin ribbon violin"}},
    [PLACE] = {"PLACE", BY_TOPIC, 1, 0, PLAIN, {
        "harbor lighthouse island beach", "mill barn orchard meadow", "glade hollow oak cabin",
        "tower moat palace dungeon", "cave summit glacier valley", "bridge bakery square inn"}},
    [NOUN] = {"NOUN", BY_TOPIC, 6, 1, NOUNS, {
        "gull whale sailor turtle seal pirate crab captain mermaid lobster",
        "hen goat farmer lamb pony piglet duckling sheepdog milkmaid scarecrow",
        "owl squirrel hedgehog sparrow hunter fairy beetle raven woodcutter moth",
        "knight queen dragon prince jester wizard princess servant giant minstrel",
        "eagle goblin climber troll hermit marmot miner pilgrim yeti dwarf",
        "baker tailor pigeon merchant painter teacher beggar peddler clerk musician"}},
    [VT] = {"VT", BY_TOPIC, 3, 1, VERBS, {
        "see follow rescue chase greet", "like help feed call wash", "hear notice startle tickle remember",
        "love thank admire obey invite", "fear miss guide avoid warn", "know visit tease trust envy"}},
    [VI] = {"VI", BY_TOPIC, 3, 1, VERBS, {
        "swim sail float dive", "yawn snore dig graze", "hide listen creep hop",
        "dance bow feast boast", "shiver wander stumble roar", "sing laugh hurry whistle"}},
    [ADJ] = {"ADJ", BY_TOPIC, 3, 1, PLAIN, {
        "blue wet calm salty windy", "hungry sleepy plump muddy busy", "shy wild quiet quick mossy",
        "brave proud royal noble rich", "cold lonely weary stubborn snowy", "clever poor cheerful curious noisy"}},
    [ADV] = {"ADV", FLAT, 1, 1, PLAIN, {"softly again often loudly together slowly gladly alone well quickly "
                                "everywhere sadly bravely gently soon happily"}},
};

// ---------------------------------------------------------------------------
// Grammar. UPPERCASE: expand a rule or draw a word of a class; .s .p fix its
// number, otherwise it takes the number of what it stands in. $X: the X drawn
// before. a|b: singular or plural. a/b: the hero is a girl or a boy. ^: no
// space before (so is punctuation). A rule's weight is relative to its siblings.
//
// Nothing here is ambiguous (the test searches for second readings), which is what makes the entropy exact: a noun takes
// at most one phrase or clause after it, and only a main verb takes an adverb.

typedef struct { const char *name; int weight; const char *text; } RuleSpec;

static const RuleSpec rule_specs[] = {
    {"STORY",   1, "OPENING WISH MEETING BODY ENDING"},
    {"OPENING", 5, "^Once upon a time HERO the KIND lives PREP the LOOK PLACE ."},
    {"OPENING", 3, "^There is a KIND called HERO , who lives PREP the LOOK PLACE ."},
    {"OPENING", 2, "^Far away , PREP the LOOK PLACE , lives a KIND called HERO ."},
    {"WISH",    4, "She/He wants a SHINE THING ."},
    {"WISH",    2, "Every night she/he dreams of a SHINE THING ."},
    {"WISH",    1, "Her/His only wish is to find a SHINE THING ."},
    {"MEETING", 3, "Her/His best friend is FRIEND the KIND2 ."},
    {"MEETING", 2, "One day she/he meets a KIND2 called FRIEND ."},
    {"BODY",    1, "SCENES SCENES"}, {"BODY", 2, "SCENES SCENES SCENE"}, {"BODY", 1, "SCENES SCENES SCENES"},
    {"SCENES",  1, "SCENE SCENE SCENE"},
    {"ENDING",  3, "At last $HERO the $KIND finds the $SHINE $THING PREP the $LOOK $PLACE ."},
    {"ENDING",  2, "In the end $FRIEND the $KIND2 gives $HERO the $KIND the $SHINE $THING ."},
    {"ENDING",  1, "And so the $SHINE $THING comes home to the $LOOK $PLACE with $HERO and $FRIEND ."},

    // Scenes: the world around (in singular or plural), or the hero and the friend.
    {"SCENE",   8, "WORLD.s"},
    {"SCENE",   8, "WORLD.p"},
    {"SCENE",   5, "LEAD DEED.s ."},
    {"SCENE",   2, "PAL DEED.s ."},
    {"SCENE",   2, "$HERO and $FRIEND VP.p ."},
    {"SCENE",   1, "\" ^Where is the $SHINE $THING ?\" asks $HERO the $KIND ."},
    {"SCENE",   1, "\" ^The $THING is PREP the $PLACE ,\" says $FRIEND the $KIND2 ."},
    {"WORLD",   6, "The BAR VP ."}, {"WORLD", 2, "This|These BAR VP ."},
    {"WORLD",   2, "Every|Many BAR VP ."}, {"WORLD", 2, "One|Some BAR VP ."},
    {"WORLD",   3, "At TIME NP VP ."}, {"WORLD", 2, "When NP.s VI.s , NP VP ."},
    {"TIME",    3, "night"}, {"TIME", 2, "dawn"}, {"TIME", 2, "noon"}, {"TIME", 1, "sunset"},
    {"LEAD",    5, "She/He"}, {"LEAD", 3, "$HERO"}, {"LEAD", 1, "$HERO the $KIND"},
    {"PAL",     3, "He/She"}, {"PAL", 3, "$FRIEND"}, {"PAL", 1, "$FRIEND the $KIND2"},
    {"DEED",    6, "VP"},
    {"DEED",    1, "looks for the $SHINE $THING"},
    {"DEED",    1, "walks to the $LOOK $PLACE with the HEAD.s"},
    {"DEED",    1, "asks the HEAD.p about the $THING"},

    // Subjects and objects: "the shy owl", "every owl near the gulls", "owls that like the gull".
    {"NP",      3, "the BAR"}, {"NP", 1, "this|these BAR"}, {"NP", 1, "every|many BAR"}, {"NP", 1, "one|some BAR"},
    {"BAR",     7, "HEAD"}, {"BAR", 2, "HEAD PREP PLACED"}, {"BAR", 2, "HEAD that CLAUSE"},
    {"HEAD",    2, "NOUN"}, {"HEAD", 3, "ADJ NOUN"},
    {"PLACED",  2, "the HEAD.s"}, {"PLACED", 2, "the HEAD.p"}, {"PLACED", 1, "the $PLACE"},
    {"PREP",    3, "near"}, {"PREP", 2, "behind"}, {"PREP", 1, "beside"}, {"PREP", 1, "below"}, {"PREP", 1, "above"},
    {"CLAUSE",  2, "VI"}, {"CLAUSE", 2, "VT OBJECT"},
    {"CLAUSE",  2, "the HEAD.s VT.s"}, {"CLAUSE", 2, "the HEAD.p VT.p"}, {"CLAUSE", 1, "$HERO VT.s"},
    {"OBJECT",  4, "NP.s"}, {"OBJECT", 4, "NP.p"}, {"OBJECT", 1, "$HERO"}, {"OBJECT", 1, "$FRIEND"},

    // What is said of a subject; every form of it agrees.
    {"VP",      6, "VT OBJECT"}, {"VP", 1, "VI"}, {"VP", 4, "VI ADV"},
    {"VP",      2, "is|are ADJ"}, {"VP", 2, "is|are as ADJ as NOUN.p"},
    {"VP",      1, "does|do not VI.p"}, {"VP", 1, "does|do not VT.p OBJECT"},
    {"VP",      1, "VI because NP.s VP.s"}, {"VP", 1, "VI because NP.p VP.p"},
};
enum { RULES = sizeof(rule_specs) / sizeof(rule_specs[0]), MAX_STEPS = 24, MAX_SYMBOLS = 32 };

// ---------------------------------------------------------------------------
// Chance. All of it passes through choose(), from integer weights: the same
// seed gives the same bytes on every machine. Logarithms only keep the score.

typedef struct { uint64_t state; double nats; } Author; // nats: -ln p of all choices so far

static uint64_t next_random(uint64_t *state) { // splitmix64
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Every (seed, stream) pair starts somewhere else in the generator's cycle.
static Author author_make(uint64_t seed, uint64_t stream) {
    uint64_t s = seed, t = next_random(&s) ^ stream;
    return (Author){.state = next_random(&t)};
}

typedef struct {
    int n;
    uint64_t *sum;   // running sum of the weights
    double *nats;    // -ln p of each option
    double entropy;  // their mean
} Dist;

static Dist dist_make(const uint64_t *weight, int n) {
    Dist d = {.n = n, .sum = tok_realloc(NULL, n, sizeof(uint64_t)), .nats = tok_realloc(NULL, n, sizeof(double))};
    uint64_t total = 0;
    for (int i = 0; i < n; i++) d.sum[i] = total += weight[i];
    for (int i = 0; i < n; i++) {
        double p = (double)weight[i] / (double)total;
        d.nats[i] = weight[i] ? -log(p) : INFINITY;
        if (weight[i]) d.entropy += p * d.nats[i];
    }
    return d;
}

static int choose(const Dist *d, Author *author) {
    uint64_t total = d->sum[d->n - 1], r;
    uint64_t fair = UINT64_MAX - UINT64_MAX % total; // below it every remainder is equally frequent
    do r = next_random(&author->state); while (r >= fair);
    r %= total;
    int low = 0, high = d->n - 1; // the first option whose running sum exceeds r
    while (low < high) {
        int middle = (low + high) / 2;
        if (d->sum[middle] > r) high = middle;
        else low = middle + 1;
    }
    author->nats += d->nats[low];
    return low;
}

// ---------------------------------------------------------------------------
// The language: vocabulary, word classes and grammar, in the form the author reads

typedef struct { uint16_t form[2]; int column, rank; } Word; // form[SINGULAR], form[PLURAL]
typedef struct { Word *words; int n; int in_column[MAX_COLUMNS]; Dist dist[MAX_COLUMNS]; } Class;
typedef enum { LITERAL, RECALL, DRAW, EXPAND } StepKind;
typedef struct {
    StepKind kind;
    int index;          // of the class (RECALL, DRAW) or symbol (EXPAND)
    int number;         // SINGULAR, PLURAL, or -1: that of what it stands in
    int by_gender;      // LITERAL: form[gender] rather than form[number]
    uint16_t form[2];   // LITERAL
} Step;
typedef struct { Step steps[MAX_STEPS]; int n; } Rule;
typedef struct { const char *name; int first, n; Dist dist; } Symbol; // its rules are consecutive

typedef struct {
    int vocab, english, end_of_text;  // english: how many tokens are real words; the rest is made up
    char **text;                      // bytes of each token but end-of-text
    int tokens;
    Class classes[CLASSES];
    Rule rules[RULES];
    Symbol symbols[MAX_SYMBOLS];
    int num_symbols;
    Dist topic, gender;
} Language;

// The token of a word: " word", or the bare text where no space comes before.
// Made-up words are not searched: they differ by construction, and are many.
static int find_token(const Language *lang, const char *text) {
    for (int i = 0; i < lang->tokens && (!lang->english || i < lang->english); i++)
        if (!strcmp(lang->text[i], text)) return i;
    return -1;
}

static uint16_t token_of(Language *lang, const char *word, int length) {
    char text[64];
    int skip = word[0] == '^', bare = skip || strchr(".,?", word[0]) != NULL;
    snprintf(text, sizeof(text), "%s%.*s", bare ? "" : " ", length - skip, word + skip);
    int found = find_token(lang, text);
    if (found >= 0) return (uint16_t)found;
    lang->text = tok_realloc(lang->text, lang->tokens + 1, sizeof(char *));
    lang->text[lang->tokens] = strcpy(tok_realloc(NULL, (int64_t)strlen(text) + 1, 1), text);
    return (uint16_t)lang->tokens++;
}

// owl -> owls, fairy -> fairies, princess -> princesses; for verbs: hurry -> hurries.
static void add_s(const char *word, int n, char out[64]) {
    char last = word[n - 1], before = word[n - 2];
    int ies = last == 'y' && !strchr("aeiou", before);
    int es = strchr("sxzo", last) || (last == 'h' && strchr("cs", before));
    snprintf(out, 64, "%.*s%s", n - ies, word, ies ? "ies" : es ? "es" : "s");
}

static void add_word(Language *lang, int class, int column, const char *word, int length) {
    Class *c = &lang->classes[class];
    int inflection = class_specs[class].inflection;
    char with_s[64];
    Word w = {.column = column, .rank = c->in_column[column]++};
    w.form[SINGULAR] = w.form[PLURAL] = token_of(lang, word, length);
    if (inflection != PLAIN) {
        add_s(word, length, with_s);
        w.form[inflection == NOUNS ? PLURAL : SINGULAR] = token_of(lang, with_s, (int)strlen(with_s));
    }
    c->words = tok_realloc(c->words, c->n + 1, sizeof(Word));
    c->words[c->n++] = w;
}

// Fills the vocabulary with made-up words. Word v spells the number v in a mixed
// radix of syllables (tobin, melag, ...), so no two are the same; multiplying by
// a number coprime to their count shuffles their order.
static void invent_words(Language *lang) {
    static const char *onset[] = {"b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "t", "v", "w", "br", "st"};
    static const char *vowel[] = {"a", "e", "i", "o", "u"}, *coda[] = {"l", "n", "m", "r", "k", "t", "p", "nd"};
    static const int turns[] = {NOUN, NOUN, ADJ, VT, NOUN, VI, ADV, HERO};
    const uint64_t count = 16 * 5 * 16 * 5 * 8;
    int column[CLASSES] = {0}, turn = 0;
    lang->english = lang->tokens;
    for (uint64_t k = 1; lang->tokens < lang->vocab - 1; k++) {
        int class = turns[turn % 8], v = (int)(k * 30013 % count);
        if (lang->tokens == lang->vocab - 2) class = ADJ; // room for one form only
        int *col = &column[class], girl = class == HERO && *col == 0;
        char word[64];
        snprintf(word, sizeof(word), " %s%s%s%s%s%s", onset[v % 16], vowel[v / 16 % 5], onset[v / 80 % 16],
                 vowel[v / 1280 % 5], coda[v / 6400], class == ADV ? "ly" : girl ? "a" : "");
        if (class == HERO) word[1] = (char)(word[1] - 'a' + 'A');
        if (find_token(lang, word) >= 0) continue; // happens to be English
        add_word(lang, class, *col, word + 1, (int)strlen(word + 1));
        *col = (*col + 1) % columns_of[class_specs[class].lean];
        turn++;
    }
}

// One distribution per column a class can lean to. Zipf: the word of rank r of
// its column weighs 1/(r + 5), here as an integer.
static void weigh_words(Class *c, const ClassSpec *spec) {
    uint64_t *weight = tok_realloc(NULL, c->n, sizeof(uint64_t));
    for (int column = 0; column < columns_of[spec->lean]; column++) {
        for (int i = 0; i < c->n; i++)
            weight[i] = (uint64_t)((1 << 24) / (c->words[i].rank + 5)) *
                        (uint64_t)(c->words[i].column == column ? spec->own : spec->other);
        c->dist[column] = dist_make(weight, c->n);
    }
    free(weight);
}

static int is_name(const char *name, const char *word, int n) {
    return (int)strlen(name) == n && !strncmp(name, word, (size_t)n);
}

// Reads one word of a rule's text; see "Grammar" for the notation.
static Step parse_step(Language *lang, const char *word, int length) {
    Step step = {.kind = LITERAL, .number = -1};
    int recall = word[0] == '$', name = length - recall;
    if (length > 2 && word[length - 2] == '.') {
        step.number = word[length - 1] == 'p' ? PLURAL : SINGULAR;
        name -= 2;
    }
    for (int i = 0; i < CLASSES; i++)
        if (is_name(class_specs[i].name, word + recall, name)) {
            step.kind = recall ? RECALL : DRAW, step.index = i;
            return step;
        }
    for (int i = 0; i < lang->num_symbols; i++)
        if (is_name(lang->symbols[i].name, word, name)) {
            step.kind = EXPAND, step.index = i;
            return step;
        }
    if (recall || (isupper((unsigned char)word[0]) && isupper((unsigned char)word[1])))
        tok_fail("synth", "grammar: found %.*s, expected the name of a rule or of a class", length, word);
    int cut = (int)strcspn(word, "|/ ");
    step.by_gender = cut < length && word[cut] == '/';
    step.form[0] = step.form[1] = token_of(lang, word, cut < length ? cut : length);
    if (cut < length) step.form[1] = token_of(lang, word + cut + 1, length - cut - 1);
    return step;
}

static void compile_grammar(Language *lang) {
    for (int r = 0; r < RULES; r++) { // names first: rules may mention later ones
        const char *above = r ? rule_specs[r - 1].name : "";
        if (!strcmp(above, rule_specs[r].name)) lang->symbols[lang->num_symbols - 1].n++;
        else if (lang->num_symbols == MAX_SYMBOLS) tok_fail("synth", "grammar: more than %d symbols", MAX_SYMBOLS);
        else lang->symbols[lang->num_symbols++] = (Symbol){.name = rule_specs[r].name, .first = r, .n = 1};
    }
    for (int i = 0; i < lang->num_symbols; i++) {
        Symbol *s = &lang->symbols[i];
        uint64_t weight[RULES];
        for (int r = 0; r < s->n; r++) weight[r] = (uint64_t)rule_specs[s->first + r].weight;
        s->dist = dist_make(weight, s->n);
    }
    for (int r = 0; r < RULES; r++)
        for (const char *p = rule_specs[r].text; *p;) {
            int length = (int)strcspn(p, " ");
            Rule *rule = &lang->rules[r];
            if (rule->n == MAX_STEPS)
                tok_fail("synth", "grammar: more than %d words in: %s", MAX_STEPS, rule_specs[r].text);
            rule->steps[rule->n++] = parse_step(lang, p, length);
            p += length + (p[length] == ' ');
        }
}

// Built once and never freed. A vocab below english + 1 is too small for the core.
static void language_build(Language *lang, int vocab) {
    *lang = (Language){0};
    for (int c = 0; c < CLASSES; c++)
        for (int column = 0; column < MAX_COLUMNS && class_specs[c].words[column]; column++)
            for (const char *p = class_specs[c].words[column]; *p;) {
                int length = (int)strcspn(p, " ");
                add_word(lang, c, column, p, length);
                p += length + (p[length] == ' ');
            }
    compile_grammar(lang);
    lang->vocab = vocab;
    lang->end_of_text = vocab - 1;
    invent_words(lang);
    lang->classes[FRIEND] = lang->classes[HERO]; // the same words, weighed anew
    lang->classes[KIND2] = lang->classes[KIND];
    for (int c = 0; c < CLASSES; c++) weigh_words(&lang->classes[c], &class_specs[c]);
    lang->topic = dist_make((uint64_t[TOPICS]){6, 5, 5, 4, 3, 3}, TOPICS);
    lang->gender = dist_make((uint64_t[GENDERS]){1, 1}, GENDERS);
}

// ---------------------------------------------------------------------------
// Writing a story: expand STORY from left to right

typedef struct {
    uint16_t *tokens;      // end-of-text comes first, as in any of our corpora
    int64_t n, room;
    int topic, gender;     // drawn before the first word; place and hero show them
    int memory[CLASSES];   // the word of each class that was drawn last
} Story;

static void emit(Story *story, uint16_t token) {
    if (story->n == story->room)
        story->tokens = tok_realloc(story->tokens, story->room = 2 * story->room + 256, sizeof(uint16_t));
    story->tokens[story->n++] = token;
}

static int column_now(int class, int topic, int gender) {
    return class_specs[class].lean == BY_TOPIC ? topic : class_specs[class].lean == BY_GENDER ? gender : 0;
}

static void expand(const Language *lang, Story *story, Author *author, int symbol, int number) {
    const Symbol *s = &lang->symbols[symbol];
    const Rule *rule = &lang->rules[s->first + choose(&s->dist, author)];
    for (const Step *step = rule->steps; step < rule->steps + rule->n; step++) {
        int now = step->number < 0 ? number : step->number;
        if (step->kind == EXPAND) {
            expand(lang, story, author, step->index, now);
        } else if (step->kind == LITERAL) {
            emit(story, step->form[step->by_gender ? story->gender : now]);
        } else {
            const Class *c = &lang->classes[step->index];
            int *word = &story->memory[step->index];
            int column = column_now(step->index, story->topic, story->gender);
            if (step->kind == DRAW) *word = choose(&c->dist[column], author);
            emit(story, c->words[*word].form[now]);
        }
    }
}

static void write_story(const Language *lang, Story *story, Author *author) {
    story->n = 0;
    emit(story, (uint16_t)lang->end_of_text);
    story->topic = choose(&lang->topic, author);
    story->gender = choose(&lang->gender, author);
    expand(lang, story, author, 0, SINGULAR);
}

// ---------------------------------------------------------------------------
// The perfect score. A symbol's expected nats are the entropy of its rules plus
// the expected nats of what they hold; expected tokens likewise. Symbols may hold
// themselves, so we iterate the equations until nothing changes.

typedef struct { double nats, tokens; } Mean; // expected, per story or part of one

static Mean mean_of_rule(const Language *lang, const Rule *rule, int number, int topic, int gender, Mean mean[][2]) {
    Mean m = {0};
    for (const Step *step = rule->steps; step < rule->steps + rule->n; step++) {
        if (step->kind == EXPAND) {
            Mean part = mean[step->index][step->number < 0 ? number : step->number];
            m.nats += part.nats, m.tokens += part.tokens;
            continue;
        }
        m.tokens += 1;
        if (step->kind == DRAW)
            m.nats += lang->classes[step->index].dist[column_now(step->index, topic, gender)].entropy;
    }
    return m;
}

static Mean mean_of_story(const Language *lang, int topic, int gender) {
    Mean mean[MAX_SYMBOLS][2] = {0};
    for (double change = 1; change > 1e-12;) {
        change = 0;
        for (int s = 0; s < 2 * lang->num_symbols; s++) {
            const Symbol *symbol = &lang->symbols[s / 2];
            Mean m = {.nats = symbol->dist.entropy};
            for (int r = 0; r < symbol->n; r++) {
                Mean part = mean_of_rule(lang, &lang->rules[symbol->first + r], s % 2, topic, gender, mean);
                double p = exp(-symbol->dist.nats[r]);
                m.nats += p * part.nats, m.tokens += p * part.tokens;
            }
            change += fabs(m.nats - mean[s / 2][s % 2].nats) + fabs(m.tokens - mean[s / 2][s % 2].tokens);
            mean[s / 2][s % 2] = m;
        }
    }
    return mean[0][SINGULAR];
}

// Over all stories, end-of-text included. Stories are independent of each other,
// so nats / tokens is the entropy rate of the stream.
static Mean perfect_score(const Language *lang) {
    Mean m = {lang->topic.entropy + lang->gender.entropy, 1};
    for (int i = 0; i < TOPICS * GENDERS; i++) {
        Mean part = mean_of_story(lang, i / GENDERS, i % GENDERS);
        double p = exp(-lang->topic.nats[i / GENDERS] - lang->gender.nats[i % GENDERS]);
        m.nats += p * part.nats, m.tokens += p * part.tokens;
    }
    return m;
}

// The same, measured on text: what its author paid. Per story, nats - rate * tokens
// has mean 0; the sum of its squares gives the standard error of nats / tokens.
typedef struct { double nats, tokens, squares; } Tally;

// ---------------------------------------------------------------------------
// Files

// Exactly `tokens` tokens of stories over shards; the last story may be cut.
// The shards are left finished but unpublished, under their temporary names.
static Tally write_shards(const Language *lang, Author author, double rate, ShardWriter *shards, int n, int first,
                          int64_t tokens, const char *dir, const char *split) {
    Story story = {0};
    Tally tally = {0};
    int64_t at = 0; // how much of the story is written
    for (int i = 0; i < n; i++) {
        char path[4096];
        snprintf(path, sizeof(path), "%s/synth_%s_%06d.bin", dir, split, first + i);
        shard_open(&shards[i], path, lang->vocab);
        int64_t size = tokens / n + (i < tokens % n);
        while (shards[i].tokens < size) {
            if (at == story.n) {
                author.nats = 0;
                write_story(lang, &story, &author);
                double excess = author.nats - rate * (double)story.n;
                tally.nats += author.nats, tally.tokens += (double)story.n, tally.squares += excess * excess;
                at = 0;
            }
            int64_t left = size - shards[i].tokens, chunk = story.n - at < left ? story.n - at : left;
            shard_append(&shards[i], story.tokens + at, chunk);
            at += chunk;
        }
        shard_finish(&shards[i]);
    }
    free(story.tokens);
    return tally;
}

static void write_vocabulary(const Language *lang, FILE *file) { // tiktoken's format: base64 of the bytes, rank
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < lang->tokens; i++) {
        const unsigned char *t = (const unsigned char *)lang->text[i];
        for (int left = (int)strlen(lang->text[i]); left > 0; t += 3, left -= 3) {
            int bits = t[0] << 16 | (left > 1 ? t[1] << 8 | (left > 2 ? t[2] : 0) : 0);
            char quad[5] = {digit[bits >> 18], digit[bits >> 12 & 63], left > 1 ? digit[bits >> 6 & 63] : '=',
                            left > 2 ? digit[bits & 63] : '='};
            fputs(quad, file);
        }
        fprintf(file, " %d\n", i);
    }
}

static void print_text(const Language *lang, Author author, int64_t tokens) {
    Story story = {0};
    while (tokens > 0) {
        write_story(lang, &story, &author);
        for (int64_t i = 1; i < story.n && i < tokens; i++) fputs(lang->text[story.tokens[i]], stdout);
        fputs("\n\n", stdout);
        tokens -= story.n;
    }
    free(story.tokens);
}

// ---------------------------------------------------------------------------
// Command line

enum { MAX_SHARDS = 1000 };
enum { TOKENS, VAL_TOKENS, SHARDS, SEED, VOCAB, OUT, TEXT, HELP, OPTIONS };
static const struct { const char *flag, *value; int64_t least, most, standard; const char *help; } options[OPTIONS] = {
    [TOKENS]     = {"--tokens", "N", 1, INT64_C(1000000000000), 4000000, "training tokens"},
    [VAL_TOKENS] = {"--val-tokens", "N", 1, INT32_MAX, 200000, "validation tokens"},
    [SHARDS]     = {"--shards", "K", 1, MAX_SHARDS, 2, "files that the training tokens are spread over"},
    [SEED]       = {"--seed", "S", 0, INT64_MAX, 1, "other seeds tell other stories in the same language"},
    [VOCAB]      = {"--vocab", "V", 1, SHARD_MAX_VOCAB, 1024, "vocabulary size; made-up words fill it"},
    [OUT]        = {"--out", "DIR", 0, 0, 0, "folder for shards and vocabulary (default data/synthetic)"},
    [TEXT]       = {"--text", "", 0, 0, 0, "print the training text to standard output instead"},
    [HELP]       = {"--help", "", 0, 0, 0, "print this"},
};

__attribute__((format(printf, 1, 2), noreturn)) static void usage_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("synth: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(2);
}

static int edit_distance(const char *a, const char *b) { // Levenshtein's; for short strings
    int row[64], n = (int)strlen(b);
    if (n > 62) return 64;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; *a; a++, i++)
        for (int j = 1, corner = row[0]++; j <= n; j++) {
            int replace = corner + (*a != b[j - 1]), skip = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
            corner = row[j];
            row[j] = replace < skip ? replace : skip;
        }
    return row[n];
}

static int find_option(const char *word) {
    int nearest = 0;
    for (int o = 0; o < OPTIONS; o++) {
        if (!strcmp(word, options[o].flag)) return o;
        if (edit_distance(options[o].flag, word) < edit_distance(options[nearest].flag, word)) nearest = o;
    }
    usage_error("found \"%s\", expected a flag; the nearest is %s (--help lists all)", word, options[nearest].flag);
}

static void parse_options(int argc, char **argv, int64_t *value, const char **out) {
    for (int o = 0; o < OPTIONS; o++) value[o] = options[o].standard;
    for (int i = 1; i < argc; i++) {
        int o = find_option(argv[i]);
        if (!options[o].value[0]) { value[o] = 1; continue; }
        if (i + 1 == argc) usage_error("%s: found nothing after it, expected %s", options[o].flag, options[o].value);
        char *text = argv[++i], *end = text;
        if (o == OUT) {
            size_t n = strlen(text);
            if (n < 1 || n > 4000) usage_error("--out: found a name of %zu bytes, expected 1 to 4000", n);
            *out = text;
            continue;
        }
        errno = 0;
        value[o] = strtoll(text, &end, 10);
        if (end == text || *end || errno || value[o] < options[o].least || value[o] > options[o].most)
            usage_error("%s: found \"%s\", expected a whole number from %lld to %lld", options[o].flag, text,
                        (long long)options[o].least, (long long)options[o].most);
    }
    if (value[SHARDS] > value[TOKENS] || value[TOKENS] / value[SHARDS] >= INT32_MAX)
        usage_error("--shards: found %lld for %lld tokens, expected 1 to %d tokens in each shard",
                    (long long)value[SHARDS], (long long)value[TOKENS], INT32_MAX);
}

static void print_help(void) {
    printf("synth: writes a training corpus of little stories whose perfect score is known\n\n");
    for (int o = 0; o < OPTIONS; o++) {
        printf("  %-12s %-4s %s", options[o].flag, options[o].value, options[o].help);
        if (options[o].most) printf(" (default %lld)", (long long)options[o].standard);
        putchar('\n');
    }
}

// All files are complete before the first appears under its name, and shards
// left by an earlier run with more of them go, lest readers mix two corpora.
static Tally write_corpus(const Language *lang, double rate, Author train, Author val, const int64_t *value,
                          const char *out) {
    static ShardWriter shards[MAX_SHARDS + 1];
    int n = (int)value[SHARDS];
    char path[4096], temporary[4200];
    if (mkdir(out, 0777) != 0 && errno != EEXIST)
        tok_fail("synth", "%s: cannot create the folder: %s", out, strerror(errno));
    write_shards(lang, train, rate, shards, n, 1, value[TOKENS], out, "train");
    Tally tally = write_shards(lang, val, rate, shards + n, 1, 0, value[VAL_TOKENS], out, "val");

    snprintf(path, sizeof(path), "%s/synth.tiktoken", out);
    snprintf(temporary, sizeof(temporary), "%s.%ld.tmp", path, (long)getpid());
    FILE *file = fopen(temporary, "wb");
    if (!file) tok_fail("synth", "%s: cannot create: %s", temporary, strerror(errno));
    write_vocabulary(lang, file);
    int bad = ferror(file) | fflush(file) | fsync(fileno(file));
    if (fclose(file) | bad || rename(temporary, path) != 0) {
        int reason = errno;
        unlink(temporary);
        tok_fail("synth", "%s: cannot write: %s", path, strerror(reason));
    }
    printf("%s\n", path);
    for (int i = 0; i <= n; i++) {
        printf("%s: %lld tokens\n", shards[i].path, (long long)shards[i].tokens);
        shard_publish(&shards[i]);
    }
    for (int i = n + 1; i <= MAX_SHARDS; i++) {
        snprintf(path, sizeof(path), "%s/synth_train_%06d.bin", out, i);
        if (unlink(path) != 0) break;
        printf("%s: removed, from an earlier run\n", path);
    }
    return tally;
}

// A full disk shows only when what was printed is flushed.
static int finish_output(void) {
    if (ferror(stdout) || fflush(stdout) != 0) tok_fail("synth", "standard output: cannot write: %s", strerror(errno));
    return 0;
}

static int synth_main(int argc, char **argv) {
    static Language lang;
    int64_t value[OPTIONS];
    const char *out = "data/synthetic";
    parse_options(argc, argv, value, &out);
    if (value[HELP]) return print_help(), finish_output();
    language_build(&lang, (int)value[VOCAB]);
    if (lang.tokens >= lang.vocab)
        usage_error("--vocab: found %d, expected at least %d (English and end-of-text)", lang.vocab, lang.english + 1);
    Author train = author_make((uint64_t)value[SEED], 0), val = author_make((uint64_t)value[SEED], 1);
    if (value[TEXT]) return print_text(&lang, train, value[TOKENS]), finish_output();

    Mean perfect = perfect_score(&lang);
    double rate = perfect.nats / perfect.tokens;
    Tally tally = write_corpus(&lang, rate, train, val, value, out);
    printf("vocabulary: %d tokens: %d of English, %d made up, end-of-text %d\n", lang.vocab, lang.english,
           lang.tokens - lang.english, lang.end_of_text);
    printf("perfect model: %.4f nats/token (perplexity %.2f), %.1f tokens a story\n", rate, exp(rate), perfect.tokens);
    printf("its loss on the validation text: %.4f (standard error %.4f)\n", tally.nats / tally.tokens,
           sqrt(tally.squares) / tally.tokens);
    return finish_output();
}

#ifndef TESTING
int main(int argc, char **argv) { return synth_main(argc, argv); }
#endif
