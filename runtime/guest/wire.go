package guest

import (
	"bufio"
	"bytes"
	"io"
)

// Routes of the guest's HTTP server, relative to its socket. Arguments are query
// parameters; the comments name the bodies.
const (
	RouteHello      = "/hello"     // GET → Hello
	RouteTrust      = "/trust"     // PUT Trust → TrustResult
	RouteExec       = "/exec"      // POST ExecRequest → frames, both ways with StreamStdin
	RouteProcess    = "/process"   // POST ProcessSpec → Process; GET → []Process
	RouteTerminal   = "/terminal"  // POST TerminalSpec → Terminal; DELETE RouteTerminal/{id} grace → Terminal
	RouteSession    = "/session"   // POST SessionSpec → Session; DELETE RouteSession/{id} grace → Session
	RouteFile       = "/file"      // PUT path, mode, create_new, sha256, offset, length, size (If-Match, If-None-Match): raw body → FileInfo; GET path (Range, conditions) → raw; DELETE path, recursive (If-Match)
	RouteStat       = "/stat"      // GET path, follow, digest → FileInfo
	RouteList       = "/list"      // GET path, recursive, hidden → lines of ListLine
	RouteSearch     = "/search"    // GET path, name, exclude, hidden, content, limit → lines of SearchLine
	RouteMkdir      = "/mkdir"     // POST path, mode → FileInfo
	RouteMove       = "/move"      // POST from, to (If-Match) → FileInfo
	RouteArchive    = "/archive"   // PUT path: tar or tar.gz → ArchiveResult; GET path → tar
	RoutePort       = "/port"      // GET port, wait → {}
	RouteEvents     = "/events"    // GET → lines of Event
	RouteWatch      = "/watch"     // POST WatchSpec → lines of WatchLine
	RouteTrim       = "/trim"      // POST → nothing, until the connection ends
	RouteHold       = "/hold"      // POST for, on SandboxSocketName only
	SuffixStop      = "/stop"      // POST RouteProcess/{id}/stop grace → Process
	SuffixSignal    = "/signal"    // POST RouteProcess/{id}/signal signal → Process
	SuffixWait      = "/wait"      // POST RouteProcess/{id}/wait Wait → WaitResult
	SuffixLogs      = "/logs"      // GET RouteProcess/{id}/logs follow → frames
	SuffixInterrupt = "/interrupt" // POST RouteSession/{id}/interrupt → Session
	SuffixAttach    = "/attach"    // GET RouteTerminal/{id}/attach since → frames both ways
)

// UpgradeExec is the protocol to which the connection of an exec with StreamStdin
// is upgraded: frames in both directions.
const UpgradeExec = "doze-exec"

// UpgradeTerminal is the protocol to which the connection of a viewer of a terminal is
// upgraded: frames in both directions.
const UpgradeTerminal = "doze-terminal"

// MaxListing bounds the bytes of one directory listing. A longer one is truncated, and its
// ListEnd reports that.
const MaxListing = 32 << 20

// ListLine is one line of a directory listing: an entry or, last, the end. A
// listing without an end was cut short by a failure.
type ListLine struct {
	Entry *FileInfo `json:"entry,omitempty"`
	End   *ListEnd  `json:"end,omitempty"`
}

// ListEnd closes a listing.
type ListEnd struct {
	Truncated bool `json:"truncated"` // the folder has more than MaxEntries or MaxListing allow
}

// ArchiveResult is the result of PutArchive.
type ArchiveResult struct {
	Files int   `json:"files"` // entries of every kind
	Bytes int64 `json:"bytes"` // of contents
}

// newLines scans lines of JSON, of at most MaxFrame bytes. It drops an incomplete line at
// the end of the stream.
func newLines(r io.Reader) *bufio.Scanner {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 1024), MaxFrame)
	lines.Split(func(data []byte, _ bool) (int, []byte, error) {
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			return i + 1, data[:i], nil
		}
		return 0, nil, nil
	})
	return lines
}
