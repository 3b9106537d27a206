/* error.c - words for failures. */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>

enum geist_status gst_fail(char *error, enum geist_status status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(error, GST_ERROR_BYTES, format, arguments);
    va_end(arguments);
    /* Names out of a file end up in messages and from there on terminals. */
    for (char *p = error; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    return status;
}

const char *geist_status_text(enum geist_status status)
{
    switch (status) {
    case GEIST_OK:
        return "ok";
    case GEIST_E_ARGUMENT:
        return "argument";
    case GEIST_E_MEMORY:
        return "memory";
    case GEIST_E_IO:
        return "io";
    case GEIST_E_FORMAT:
        return "format";
    case GEIST_E_UNSUPPORTED:
        return "unsupported";
    case GEIST_E_TOKEN:
        return "token";
    case GEIST_E_TOO_LONG:
        return "too long";
    case GEIST_E_IMAGE:
        return "image";
    case GEIST_E_MISMATCH:
        return "mismatch";
    case GEIST_E_NONFINITE:
        return "nonfinite";
    case GEIST_E_STATE:
        return "state";
    case GEIST_E_BUFFER:
        return "buffer";
    }
    return "unknown";
}
