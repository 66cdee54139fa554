// Decodes a token of a GGUF model at a depth with llama.cpp and marks its parts, for tools/arm_count.py.
//
//     arm_count_llama MODEL DEPTH FLASH(0|1) CACHE(f16|q8_0|q4_0)
//
// The cache is filled with the rows of the first 32 tokens, over and over: what is counted does not depend on them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "ggml.h"
#include "llama.h"

enum { REST = 0, LINEAR = 1, ATTENTION = 2, ROPE = 3, BETWEEN = 4, PRINT = 255, SEED_TOKENS = 32, CALIBRATION = 64 };

static void mark(int part) { syscall(SYS_getpriority, 0x65646765, part); }

static int part_of(const ggml_tensor *t) {
    switch (t->op) {
        case GGML_OP_ROPE: return ROPE;
        case GGML_OP_FLASH_ATTN_EXT:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_SET_ROWS:
        case GGML_OP_CPY:
        case GGML_OP_CONT: return ATTENTION;
        case GGML_OP_MUL_MAT: return ggml_is_quantized(t->src[0]->type) && t->src[0]->op == GGML_OP_NONE &&
                                      strstr(t->src[0]->name, "weight") ? LINEAR : ATTENTION;
        case GGML_OP_GET_ROWS: return REST;
        default: return LINEAR;  // norms, activations, residual sums
    }
}

static bool split;  // whether each operation is computed, and marked, by itself

static bool observe(ggml_tensor *t, bool ask, void *) {
    if (!split) return false;
    mark(ask ? part_of(t) : BETWEEN);
    return true;
}

static void require(bool good, const char *what) {
    if (good) return;
    fprintf(stderr, "arm_count_llama: %s failed\n", what);
    exit(1);
}

// What llama_state_seq_get_data wrote of SEED_TOKENS cells, as if there were `depth` of them.
static std::vector<uint8_t> deepened(const std::vector<uint8_t> &state, uint32_t depth) {
    std::vector<uint8_t> out;
    size_t at = 0;
    auto copy = [&](size_t n) { out.insert(out.end(), &state[at], &state[at] + n); at += n; };
    auto peek = [&](size_t offset) { uint32_t x; memcpy(&x, &state[at + offset], 4); return x; };
    auto put = [&](uint32_t x) { auto *p = (const uint8_t *)&x; out.insert(out.end(), p, p + 4); };
    auto repeat = [&](size_t size) {
        for (uint32_t i = 0; i < depth; i++) {
            const uint8_t *cell = &state[at + i % SEED_TOKENS * size];
            out.insert(out.end(), cell, cell + size);
        }
        at += SEED_TOKENS * size;
    };
    copy(8);  // magic, sequence
    require(peek(0) == 1 && peek(4) == SEED_TOKENS, "reading the state's header");
    put(1), put(depth), at += 8;
    for (uint32_t i = 0; i < depth; i++) put(i), put(1), put(0);  // position, one sequence, its number
    at += 12 * SEED_TOKENS;
    uint32_t transposed = peek(0), n_layer = peek(4);
    copy(8);
    for (uint32_t layer = 0; layer < n_layer; layer++) {
        uint32_t row = peek(4);
        copy(12), repeat(row);
    }
    for (uint32_t layer = 0; layer < n_layer; layer++) {
        if (!transposed) {
            uint32_t row = peek(4);
            copy(12), repeat(row);
            continue;
        }
        uint32_t element = peek(4), rows = peek(8);
        copy(12);
        for (uint32_t i = 0; i < rows; i++) repeat(element);
    }
    require(at == state.size(), "reading the state");
    return out;
}

int main(int argc, char **argv) {
    if (argc != 5) return fprintf(stderr, "arm_count_llama MODEL DEPTH FLASH CACHE\n"), 2;
    const int depth = atoi(argv[2]);
    const std::string cache = argv[4];
    llama_log_set([](ggml_log_level level, const char *text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    require(model, "loading the model");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = depth + 256;
    params.n_batch = params.n_ubatch = SEED_TOKENS;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = argv[3][0] == '1' ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v =
        cache == "q4_0" ? GGML_TYPE_Q4_0 : cache == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
    params.cb_eval = observe;
    llama_context *context = llama_init_from_model(model, params);
    require(context, "making a context");

    std::vector<llama_token> tokens(SEED_TOKENS);
    for (int i = 0; i < SEED_TOKENS; i++) tokens[i] = 3 + 7 * i;
    require(!llama_decode(context, llama_batch_get_one(tokens.data(), SEED_TOKENS)), "decoding");
    std::vector<uint8_t> state(llama_state_seq_get_size(context, 0));
    llama_state_seq_get_data(context, state.data(), state.size(), 0);
    std::vector<uint8_t> deep = deepened(state, depth);
    llama_memory_clear(llama_get_memory(context), true);
    require(llama_state_seq_set_data(context, deep.data(), deep.size(), 0), "filling the cache");

    auto token = [&] {
        llama_token id = 5;
        require(!llama_decode(context, llama_batch_get_one(&id, 1)), "decoding");
        const float *logits = llama_get_logits_ith(context, -1);
        int best = 0;
        for (int i = 1; i < llama_vocab_n_tokens(llama_model_get_vocab(model)); i++)
            if (logits[i] > logits[best]) best = i;
        return best;
    };
    token();  // the first makes the graph
    mark(PRINT);
    for (int i = 0; i < CALIBRATION; i++) mark(REST);
    mark(PRINT);
    mark(REST);
    token();
    mark(PRINT);  // whole, as it is run
    split = true;
    mark(REST);
    token();
    mark(PRINT);  // by part
    return 0;
}
