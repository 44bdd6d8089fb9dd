/* Follows a child process and sees every system call that changes something under one folder, whichever library makes
 * it: Python, torch, safetensors, Arrow. At a chosen call it kills the child, also in the middle of a write, or says
 * that the disk is full. Its log has what a power loss needs to know: sizes at each flush, and what renames replaced.
 *
 * The kernel stops the child at the calls that a seccomp filter names, so the rest runs at full speed. The same calls
 * seen from inside (LD_PRELOAD) would miss those that Rust makes without the C library.
 */

#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum { AT_CWD = -1, NO_ARG = -2 };

/* How a system call names what it changes: the argument that holds a descriptor or a folder, and that of a path. */
typedef struct {
    int number;
    const char *kind;
    int descriptor;   /* argument with an open file, or with the folder that a path is relative to */
    int path;         /* argument with a path, or NO_ARG */
    int bytes;        /* argument with the number of bytes written, or NO_ARG */
    int flags;        /* argument that must have one of `any_of`, or NO_ARG */
    unsigned any_of;
} Call;

#define OPENS_FOR_WRITING (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)

static const Call CALLS[] = {
#ifdef __NR_open
    {__NR_open, "open", AT_CWD, 0, NO_ARG, 1, OPENS_FOR_WRITING},
    {__NR_creat, "open", AT_CWD, 0, NO_ARG, NO_ARG, 0},
    {__NR_rename, "rename", AT_CWD, 1, NO_ARG, NO_ARG, 0},
    {__NR_unlink, "unlink", AT_CWD, 0, NO_ARG, NO_ARG, 0},
    {__NR_rmdir, "unlink", AT_CWD, 0, NO_ARG, NO_ARG, 0},
    {__NR_mkdir, "mkdir", AT_CWD, 0, NO_ARG, NO_ARG, 0},
    {__NR_link, "link", AT_CWD, 1, NO_ARG, NO_ARG, 0},
    {__NR_symlink, "link", AT_CWD, 1, NO_ARG, NO_ARG, 0},
#endif
    {__NR_openat, "open", 0, 1, NO_ARG, 2, OPENS_FOR_WRITING},
#ifdef __NR_openat2
    {__NR_openat2, "open", 0, 1, NO_ARG, NO_ARG, 0},
#endif
#ifdef __NR_renameat
    {__NR_renameat, "rename", 2, 3, NO_ARG, NO_ARG, 0},
#endif
    {__NR_renameat2, "rename", 2, 3, NO_ARG, NO_ARG, 0},
    {__NR_unlinkat, "unlink", 0, 1, NO_ARG, NO_ARG, 0},
    {__NR_mkdirat, "mkdir", 0, 1, NO_ARG, NO_ARG, 0},
    {__NR_linkat, "link", 2, 3, NO_ARG, NO_ARG, 0},
    {__NR_symlinkat, "link", 1, 2, NO_ARG, NO_ARG, 0},
    {__NR_write, "write", 0, NO_ARG, 2, NO_ARG, 0},
    {__NR_pwrite64, "write", 0, NO_ARG, 2, NO_ARG, 0},
    {__NR_writev, "writev", 0, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_pwritev, "writev", 0, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_pwritev2, "writev", 0, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_sendfile, "write", 0, NO_ARG, 3, NO_ARG, 0},
    {__NR_copy_file_range, "write", 2, NO_ARG, 4, NO_ARG, 0},
    {__NR_fsync, "fsync", 0, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_fdatasync, "fsync", 0, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_msync, "fsync", NO_ARG, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_truncate, "truncate", AT_CWD, 0, NO_ARG, NO_ARG, 0},
    {__NR_ftruncate, "truncate", 0, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_fallocate, "truncate", 0, NO_ARG, NO_ARG, NO_ARG, 0},
    {__NR_mmap, "mmap", 4, NO_ARG, NO_ARG, 3, MAP_SHARED},
};
enum { CALL_COUNT = sizeof CALLS / sizeof CALLS[0] };

/* ---- registers ---- */

#if defined(__x86_64__)
typedef struct user_regs_struct Registers;
static const unsigned ARCHITECTURE = AUDIT_ARCH_X86_64;
static unsigned long long *argument(Registers *r, int i) {
    unsigned long long *all[] = {&r->rdi, &r->rsi, &r->rdx, &r->r10, &r->r8, &r->r9};
    return all[i];
}
static int read_registers(pid_t task, Registers *r, long *number) {
    int failed = ptrace(PTRACE_GETREGS, task, 0, r) < 0;
    *number = (long)r->orig_rax;
    return failed;
}
static void write_registers(pid_t task, Registers *r) { ptrace(PTRACE_SETREGS, task, 0, r); }
static void answer_instead(pid_t task, Registers *r, long long result) {
    r->orig_rax = -1ULL; /* no call is made, and this is its result */
    r->rax = (unsigned long long)result;
    write_registers(task, r);
}
#elif defined(__aarch64__)
typedef struct user_regs_struct Registers;
static const unsigned ARCHITECTURE = AUDIT_ARCH_AARCH64;
static unsigned long long *argument(Registers *r, int i) { return (unsigned long long *)&r->regs[i]; }
static int read_registers(pid_t task, Registers *r, long *number) {
    struct iovec part = {r, sizeof *r};
    int failed = ptrace(PTRACE_GETREGSET, task, NT_PRSTATUS, &part) < 0;
    *number = (long)r->regs[8];
    return failed;
}
static void write_registers(pid_t task, Registers *r) {
    struct iovec part = {r, sizeof *r};
    ptrace(PTRACE_SETREGSET, task, NT_PRSTATUS, &part);
}
static void answer_instead(pid_t task, Registers *r, long long result) {
    int none = -1;
    struct iovec part = {&none, sizeof none};
    ptrace(PTRACE_SETREGSET, task, 0x404 /* NT_ARM_SYSTEM_CALL */, &part);
    r->regs[0] = (unsigned long long)result;
    write_registers(task, r);
}
#else
#error "file_events.c knows the registers of x86-64 and arm64"
#endif

/* ---- the child's side ---- */

static int install_filter(void) {
    struct sock_filter program[8 * CALL_COUNT + 8];
    int size = 0;
#define EMIT(...) program[size++] = (struct sock_filter)__VA_ARGS__
    EMIT(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)));
    EMIT(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0));
    EMIT(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    EMIT(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (int i = 0; i < CALL_COUNT; i++) {
        const Call *call = &CALLS[i];
        if (call->flags == NO_ARG) {
            EMIT(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call->number, 0, 1));
            EMIT(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE));
            continue;
        }
        EMIT(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call->number, 0, 4));
        EMIT(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)offsetof(struct seccomp_data, args[call->flags])));
        EMIT(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, call->any_of, 0, 1));
        EMIT(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE));
        EMIT(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    }
    EMIT(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    struct sock_fprog filter = {(unsigned short)size, program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

/* Called in the child after fork; returns 0 once the parent follows it. */
int become_followed(void) {
    if (ptrace(PTRACE_TRACEME, 0, 0, 0)) return -1;
    raise(SIGSTOP);
    return install_filter();
}

/* ---- the parent's side ---- */

typedef struct {
    const char *root;
    long kill_at;        /* kill at this event, counted from 1; 0 never */
    int in_the_middle;   /* of a write: half of it reaches the file before the kill */
    long long disk;      /* bytes that fit under the root; negative for no limit */
    long long used;
    long long peak;      /* most bytes that were used at any time */
    long events;
    FILE *log;
    const char *removed; /* folder that keeps, by event, a link to each file that a rename replaces or an unlink removes */
} Followed;

static int read_text(pid_t task, unsigned long long address, char *text, size_t size) {
    size_t got = 0;
    while (got + 1 < size) {
        size_t to_page_end = 4096 - (address + got) % 4096;
        size_t wanted = size - 1 - got < to_page_end ? size - 1 - got : to_page_end;
        struct iovec mine = {text + got, wanted}, theirs = {(void *)(address + got), wanted};
        ssize_t part = process_vm_readv(task, &mine, 1, &theirs, 1, 0);
        if (part <= 0) return -1;
        if (memchr(text + got, 0, (size_t)part)) return 0;
        got += (size_t)part;
    }
    text[got] = 0;
    return 0;
}

static void follow_link(const char *link, char *text, size_t size) {
    ssize_t length = readlink(link, text, size - 1);
    text[length < 0 ? 0 : length] = 0;
}

/* The absolute path that a call changes; empty if there is none. */
static void path_of(pid_t task, const Call *call, Registers *r, char *path, size_t size) {
    char link[64], folder[4096], name[4096];
    path[0] = 0;
    if (call->descriptor == NO_ARG) return;
    int descriptor = call->descriptor == AT_CWD ? AT_FDCWD : (int)*argument(r, call->descriptor);
    if (call->path == NO_ARG) {
        if (descriptor < 0) return;
        snprintf(link, sizeof link, "/proc/%d/fd/%d", task, descriptor);
        follow_link(link, path, size);
        return;
    }
    if (read_text(task, *argument(r, call->path), name, sizeof name)) return;
    if (name[0] == '/') {
        snprintf(path, size, "%s", name);
        return;
    }
    if (descriptor == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/%d/cwd", task);
    else
        snprintf(link, sizeof link, "/proc/%d/fd/%d", task, descriptor);
    follow_link(link, folder, sizeof folder);
    snprintf(path, size, "%s/%s", folder, name);
}

static int is_under(const char *path, const char *root) {
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == 0 || path[length] == '/');
}

static long long size_of(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0 && S_ISREG(found.st_mode) && found.st_nlink == 1 ? (long long)found.st_size : 0;
}

/* The path that a rename or a link names first; its arguments stand right before those of the path that it changes. */
static void source_of(pid_t task, const Call *call, Registers *r, char *path, size_t size) {
    int both = call->descriptor == AT_CWD ? 1 : 2; /* a folder and a path, or a path alone */
    Call from = *call;
    from.path -= both;
    from.descriptor = both == 1 ? AT_CWD : call->descriptor - both;
    path_of(task, &from, r, path, size);
}

/* What a call asks for: bytes to write, the size to cut to, or 1 if an open empties the file. */
static long long amount_of(const Call *call, Registers *r) {
    if (call->bytes != NO_ARG) return (long long)*argument(r, call->bytes);
    if (call->number == __NR_ftruncate || call->number == __NR_truncate) return (long long)*argument(r, 1);
    return call->flags != NO_ARG && !strcmp(call->kind, "open") && (*argument(r, call->flags) & O_TRUNC);
}

/* One line of the log: number, kind, amount, path, then inode and size of what the path names now, and the source. */
static void log_event(Followed *f, pid_t task, const Call *call, Registers *r, const char *path) {
    char source[8192] = "";
    struct stat now;
    if (lstat(path, &now)) memset(&now, 0, sizeof now);
    if (!strcmp(call->kind, "rename") || !strcmp(call->kind, "link")) source_of(task, call, r, source, sizeof source);
    const char *from = is_under(source, f->root) ? source + strlen(f->root) : "";
    fprintf(f->log, "%ld\t%s\t%lld\t%s\t%llu\t%lld\t%s\n", f->events, call->kind, amount_of(call, r),
            path + strlen(f->root), (unsigned long long)now.st_ino, (long long)now.st_size, from);
}

/* Keep a link to a file that the next call takes from its name. */
static void keep_removed(const Followed *f, const Call *call, const char *path) {
    char link_path[8192];
    if (!f->removed || (strcmp(call->kind, "rename") && strcmp(call->kind, "unlink"))) return;
    snprintf(link_path, sizeof link_path, "%s/%ld", f->removed, f->events);
    (void)!link(path, link_path); /* fails where nothing is there, or a folder */
}

/* Whether a file can be made or grow; what does not fit is refused as the kernel does: first a short write. */
static int refuse_if_full(Followed *f, pid_t task, const Call *call, Registers *r, const char *path) {
    int is_open = !strcmp(call->kind, "open"), is_new = is_open || !strcmp(call->kind, "mkdir");
    if (!strcmp(call->kind, "unlink")) f->used -= size_of(path);
    if (is_open && call->flags != NO_ARG && (*argument(r, call->flags) & O_TRUNC)) f->used -= size_of(path);

    if (is_new && access(path, F_OK) && f->used >= f->disk) {
        answer_instead(task, r, -ENOSPC);
        return 1;
    }
    if (call->bytes == NO_ARG) return 0;
    long long wanted = (long long)*argument(r, call->bytes), room = f->disk - f->used;
    if (room <= 0 && wanted > 0) {
        answer_instead(task, r, -ENOSPC);
        return 1;
    }
    if (wanted > room) {
        *argument(r, call->bytes) = (unsigned long long)room;
        write_registers(task, r);
        wanted = room;
    }
    f->used += wanted;
    if (f->used > f->peak) f->peak = f->used;
    return 0;
}

/* One stop at a call; returns 1 if the child was killed. */
static int at_call(Followed *f, pid_t task, pid_t child) {
    Registers r;
    long number;
    char path[8192];
    if (read_registers(task, &r, &number)) return 0;
    const Call *call = NULL;
    for (int i = 0; i < CALL_COUNT && !call; i++)
        if (CALLS[i].number == number) call = &CALLS[i];
    if (!call) return 0;
    if (!strcmp(call->kind, "mmap") && !(*argument(&r, 2) & PROT_WRITE)) return 0;
    path_of(task, call, &r, path, sizeof path);
    if (!is_under(path, f->root)) return 0;

    f->events++;
    long long bytes = call->bytes == NO_ARG ? 0 : (long long)*argument(&r, call->bytes);
    if (f->log) log_event(f, task, call, &r, path);
    if (f->events == f->kill_at) {
        if (f->in_the_middle && bytes >= 2) {
            *argument(&r, call->bytes) = (unsigned long long)(bytes / 2);
            write_registers(task, &r);
            int status;
            ptrace(PTRACE_SYSCALL, task, 0, 0);
            waitpid(task, &status, __WALL);
        }
        kill(child, SIGKILL);
        return 1;
    }
    keep_removed(f, call, path);
    if (f->disk >= 0) refuse_if_full(f, task, call, &r, path);
    return 0;
}

/* Follow a child until it ends; returns the number of events under `root`, or −1 if it cannot be followed.
 *
 * log: a file for one line per event, or NULL. removed: a folder on the same disk, or NULL. status: the child's, as waitpid gives it. peak: most bytes on the disk
 * at any time, if `disk` sets a limit.
 */
long follow(pid_t child, const char *root, long kill_at, int in_the_middle, long long disk, const char *log,
            const char *removed, int *status, long long *peak) {
    Followed f = {.root = root, .kill_at = kill_at, .in_the_middle = in_the_middle, .disk = disk, .removed = removed};
    if (waitpid(child, status, __WALL) != child || !WIFSTOPPED(*status)) return -1;
    long options = PTRACE_O_EXITKILL | PTRACE_O_TRACESECCOMP | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK;
    options |= PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC;
    if (ptrace(PTRACE_SETOPTIONS, child, 0, options)) {
        kill(child, SIGKILL);
        waitpid(child, status, __WALL);
        return -1;
    }
    f.log = log ? fopen(log, "w") : NULL;
    ptrace(PTRACE_CONT, child, 0, 0);

    for (;;) {
        int stopped;
        pid_t task = waitpid(-1, &stopped, __WALL);
        if (task < 0) break;
        if (WIFEXITED(stopped) || WIFSIGNALED(stopped)) {
            if (task != child) continue;
            *status = stopped;
            break;
        }
        int number = WSTOPSIG(stopped), event = stopped >> 16;
        if (event == PTRACE_EVENT_SECCOMP && at_call(&f, task, child)) continue;

        /* Signals go on to the child; stops that only this program causes do not. */
        int is_ours = event || number == SIGSTOP || number == SIGTRAP;
        ptrace(PTRACE_CONT, task, 0, is_ours ? 0 : number);
    }
    if (f.log) fclose(f.log);
    *peak = f.peak;
    return f.events;
}
