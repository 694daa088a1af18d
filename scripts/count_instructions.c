// A plug-in of QEMU's user mode that prints how many instructions a program executed.
//
// Only what it uses of QEMU's interface is declared here, because distributions ship the emulator
// without its header. The interface is that of version 1, which QEMU 6 to 8 offer.

#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t plugin_id;
struct translated_block;
enum operation { ADD_U64 };

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id,
                                           void (*callback)(plugin_id, struct translated_block *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct translated_block *block,
                                              enum operation operation, void *counter,
                                              uint64_t amount);
void qemu_plugin_register_atexit_cb(plugin_id id, void (*callback)(plugin_id, void *), void *data);
size_t qemu_plugin_tb_n_insns(const struct translated_block *block);
void qemu_plugin_outs(const char *text);

#define SEEN __attribute__((visibility("default")))

SEEN int qemu_plugin_version = 1;

static uint64_t executed;

static void on_translation(plugin_id id, struct translated_block *block) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &executed,
                                           qemu_plugin_tb_n_insns(block));
}

static void on_exit_of_program(plugin_id id, void *data) {
  (void)id, (void)data;
  char text[64];
  snprintf(text, sizeof text, "executed %" PRIu64 " instructions\n", executed);
  qemu_plugin_outs(text);
}

SEEN int qemu_plugin_install(plugin_id id, const void *info, int count, char **words) {
  (void)info, (void)count, (void)words;
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
  qemu_plugin_register_atexit_cb(id, on_exit_of_program, NULL);
  return 0;
}
