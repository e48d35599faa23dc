package redact

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/loglimit"
)

// Messages of libraries by their constant beginning. The rest of a line may quote a
// peer, a request or a response.
var libraryMessages = []string{
	"Error enabling Transport HTTP/2 support",
	"RoundTripper returned a response & error; ignoring response",
	"Unsolicited response received on idle HTTP channel",
	"http2: 1xx informational responses too large",
	"http2: Transport encoding header",
	"http2: Transport received unsolicited DATA frame; closing connection",
	"http2: Transport: unhandled response frame type",
	"http2: header list too large",
	"http2: invalid header",
	"http2: invalid pseudo headers",
	"http2: panic serving",
	"http2: received GOAWAY",
	"http2: server closing client connection",
	"http2: server connection error from",
	"http2: server encoding header",
	"http2: server: error reading preface from client",
	"http: Accept error",
	"http: TLS handshake error from",
	"http: WriteHeader called with both Transfer-Encoding",
	"http: error reading directory",
	"http: invalid Content-Length",
	"http: panic serving",
	"http: response.Write on hijacked connection",
	"http: response.WriteHeader on hijacked connection",
	"http: superfluous response.WriteHeader call",
	"ignoring invalid trailer",
	"net/http: invalid Cookie.Domain",
	"net/http: invalid byte",
	"protocol error: received",
	"timeout waiting for PING response",
	"timeout waiting for SETTINGS frames",
}

const (
	unknownMessage = "unknown"
	// A library logs one line for each response of a hostile upstream. Of each
	// message there are at most libraryBurst lines in a row and then one in
	// libraryPause, so that one message does not use up the lines of another.
	libraryBurst = 5
	libraryPause = time.Minute
)

// Library logs lines that libraries write, through the standard logger or to an
// http.Server's ErrorLog, without what the lines quote. It is an io.Writer for
// log.SetOutput and log.New, safe for concurrent use, and never returns an error.
type Library struct {
	log   *slog.Logger
	level slog.Level

	mu       sync.Mutex
	messages map[string]*loglimit.Limit // at most one for each of libraryMessages, and one for the rest
}

// NewLibrary returns a Library that writes to log at this level.
func NewLibrary(log *slog.Logger, level slog.Level) *Library {
	return &Library{log: log, level: level, messages: map[string]*loglimit.Limit{}}
}

// Write logs one line.
func (l *Library) Write(line []byte) (int, error) {
	ctx := context.Background()
	if !l.log.Enabled(ctx, l.level) {
		return len(line), nil
	}
	text := known(string(line))
	suppressed, ok := l.limit(text).Allow()
	if !ok {
		return len(line), nil
	}
	attrs := []slog.Attr{slog.String("library_message", text)}
	if text == unknownMessage {
		attrs = append(attrs, slog.Int("length", len(line)))
	}
	l.log.LogAttrs(ctx, l.level, "library logged a message", append(attrs, suppressed...)...)
	return len(line), nil
}

// limit returns the limit of a message.
func (l *Library) limit(text string) *loglimit.Limit {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.messages[text] == nil {
		l.messages[text] = loglimit.New(rate.Every(libraryPause), libraryBurst)
	}
	return l.messages[text]
}

// known returns the constant beginning of a line, or unknownMessage. Lines may begin
// with a time and the name of a program, so the first bytes are searched for it.
func known(line string) string {
	begin := line[:min(len(line), 200)]
	for _, text := range libraryMessages {
		if strings.Contains(begin, text) {
			return text
		}
	}
	return unknownMessage
}

// Panic describes the value of a panic by its type. The value itself may quote a
// request; the value of a runtime error does not.
func Panic(value any) string {
	if err, ok := value.(interface{ RuntimeError() }); ok {
		return fmt.Sprint(err)
	}
	return fmt.Sprintf("%T", value)
}
