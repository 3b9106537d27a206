/* check.h - counting checks for native tests. One test program is one C file that includes this once.
 *
 * A check never ends the program: it counts, and says on stderr where it failed. main ends with `return check_done("test_x");`. */
#ifndef GEIST_CHECK_H
#define GEIST_CHECK_H

#include "geist.h"

#include <stdio.h>

static unsigned check_n_passed, check_n_failed;

static inline int check_at(int ok, const char *file, int line, const char *what)
{
    if (ok) {
        check_n_passed++;
    } else {
        check_n_failed++;
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
    }
    return ok;
}

static inline int check_status_at(enum geist_status got, enum geist_status wanted, const char *file, int line, const char *what)
{
    if (got != wanted)
        fprintf(stderr, "%s:%d: status \"%s\", wanted \"%s\"\n", file, line, geist_status_text(got), geist_status_text(wanted));
    return check_at(got == wanted, file, line, what);
}

/* Both have a value: 1 when the check passed, so that what depends on it can be left out. */
#define CHECK(cond) check_at(!!(cond), __FILE__, __LINE__, #cond)
#define CHECK_STATUS(expr, status) check_status_at((expr), (status), __FILE__, __LINE__, #expr)

static inline int check_done(const char *name)
{
    printf("%s: %u passed, %u failed\n", name, check_n_passed, check_n_failed);
    return check_n_failed != 0 || check_n_passed == 0;
}

#endif
