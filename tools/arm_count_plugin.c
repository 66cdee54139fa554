/* A plugin of qemu's user emulation that counts the guest's instructions by part.
 *
 * The guest says which part begins by a system call that nobody else makes: getpriority(MARK, part). At part
 * PRINT a line goes to standard error, "counts" and for each part its instructions and how often it began, and all
 * start again from 0. One thread of the guest may run. Declares what it uses of qemu-plugin.h, version 1 (qemu 6 to 8).
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { GETPRIORITY = 141, MARK = 0x65646765, PARTS = 8, PRINT = 255 };

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
typedef void on_syscall(qemu_plugin_id_t, unsigned, int64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                        uint64_t, uint64_t, uint64_t);
extern void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t, on_syscall *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t total, last, counts[PARTS], began[PARTS];
static unsigned current;

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0 /* add */, &total, qemu_plugin_tb_n_insns(block));
}

static void marked(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t mark, uint64_t part, uint64_t a3,
                   uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
    if (number != GETPRIORITY || (uint32_t)mark != MARK) return;
    counts[current] += total - last;
    last = total;
    if ((uint32_t)part == PRINT) {
        fprintf(stderr, "counts");
        for (int i = 0; i < PARTS; i++) fprintf(stderr, " %" PRIu64 " %" PRIu64, counts[i], began[i]);
        fprintf(stderr, "\n");
        memset(counts, 0, sizeof counts);
        memset(began, 0, sizeof began);
        current = 0;
    } else {
        current = part % PARTS;
        began[current]++;
    }
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc,
                                                               char **argv) {
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_vcpu_syscall_cb(id, marked);
    return 0;
}
