package guest

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Bounds of the watches of a sandbox. A sandbox also has a quota of the kernel's inotify
// instances and watches.
const (
	MaxWatches = 16 // including those that can only be resumed
	// MaxWatchedDirectories is half of the inotify watches that a sandbox has by default.
	MaxWatchedDirectories = 32_768
)

// watchWait is how long the guest may take to visit MaxWatchedDirectories on a busy disk,
// beyond the time of other requests.
const watchWait = time.Minute

// WatchSpec selects what a watch reports.
type WatchSpec struct {
	Path      string   `json:"path"` // a directory, or a file, which may be replaced
	Recursive bool     `json:"recursive,omitempty"`
	Include   []string `json:"include,omitempty"` // of Patterns; empty: all
	Exclude   []string `json:"exclude,omitempty"` // of Patterns; excluded directories are not visited
	// Since is the cursor after which the watch resumes, or the zero value. If the events
	// after it are lost, or the watch differs, the stream begins with WatchOverflow.
	Since WatchCursor `json:"since,omitzero"`
}

// WatchCursor is a position in the events of a watch.
type WatchCursor struct {
	Watch string `json:"watch"`
	Seq   uint64 `json:"seq"`
}

func (c WatchCursor) String() string { return c.Watch + "-" + strconv.FormatUint(c.Seq, 10) }

// ParseWatchCursor is the inverse of WatchCursor.String.
func ParseWatchCursor(text string) (WatchCursor, error) {
	id, number, _ := strings.Cut(text, "-")
	seq, err := strconv.ParseUint(number, 10, 63)
	if !isWatchID(id) || err != nil {
		return WatchCursor{}, fmt.Errorf("%q is not a cursor of a watch", Shorten(text, 40))
	}
	return WatchCursor{id, seq}, nil
}

// NewWatchID returns a random id of a watch, such as "k3f9x2m7".
func NewWatchID() string { return randomID() }

func isWatchID(s string) bool {
	return len(s) == processIDLength && strings.Trim(s, processIDChars) == ""
}

// WatchLine is one line of the guest's response: Started first, then Events.
type WatchLine struct {
	Started *WatchStarted `json:"started,omitempty"`
	Events  []WatchEvent  `json:"events,omitempty"`
}

// WatchStarted is the beginning of a watch: each change from now on is reported.
type WatchStarted struct {
	Watch   string `json:"watch"`             // its id
	Seq     uint64 `json:"seq"`               // of the event before the first of this stream
	Resumed bool   `json:"resumed,omitempty"` // no event since the cursor is lost
	// Directories is the number of watched directories, and Unreadable of those below
	// them that cannot be read, whose content is not reported.
	Directories int `json:"directories"`
	Unreadable  int `json:"unreadable,omitempty"`
}

// WatchEventType is the type of a WatchEvent.
type WatchEventType string

const (
	WatchCreate   WatchEventType = "create"   // a new name, or one that was moved in from elsewhere
	WatchModify   WatchEventType = "modify"   // the content may have changed
	WatchDelete   WatchEventType = "delete"   // removed or moved elsewhere, with all below
	WatchMove     WatchEventType = "move"     // renamed, with all below
	WatchAttrib   WatchEventType = "attrib"   // owner, permissions, times or extended attributes changed
	WatchOverflow WatchEventType = "overflow" // changes were lost, for Reason
	WatchStopped  WatchEventType = "stopped"  // the last event, for Reason
)

// WatchReason is why events are lost, or why a watch has ended.
type WatchReason string

const (
	// Of WatchOverflow:
	WatchQueueFull      WatchReason = "queue_full"      // changes were faster than the sandbox could record them
	WatchSlowClient     WatchReason = "slow_client"     // Dropped events were overwritten before they were sent
	WatchCursorExpired  WatchReason = "cursor_expired"  // of the resumed watch
	WatchPathUnreadable WatchReason = "path_unreadable" // the directory Path cannot be watched

	// Of WatchStopped:
	WatchRootDeleted    WatchReason = "root_deleted"
	WatchRootMoved      WatchReason = "root_moved"
	WatchRootUnreadable WatchReason = "root_unreadable" // changes were lost, and the root cannot be read again
	WatchDirectoryLimit WatchReason = "directory_limit" // a new directory cannot be watched
)

// WatchEvent is one change, or the loss of changes.
type WatchEvent struct {
	Seq     uint64         `json:"seq"`
	Type    WatchEventType `json:"type"`
	Path    []byte         `json:"path,omitempty"` // absolute; any bytes but zero
	From    []byte         `json:"from,omitempty"` // of WatchMove: the path before
	IsDir   bool           `json:"is_dir,omitempty"`
	Reason  WatchReason    `json:"reason,omitempty"`
	Dropped uint64         `json:"dropped,omitempty"` // of WatchSlowClient
}

// validate refuses an invalid event.
func (ev *WatchEvent) validate() error {
	var path, from, reason bool // whether it has them
	switch ev.Type {
	case WatchCreate, WatchModify, WatchDelete, WatchAttrib:
		path = true
	case WatchMove:
		path, from = true, true
	case WatchOverflow:
		switch ev.Reason {
		case WatchPathUnreadable:
			path, reason = true, true
		case WatchQueueFull, WatchSlowClient, WatchCursorExpired:
			reason = true
		}
	case WatchStopped:
		switch ev.Reason {
		case WatchRootDeleted, WatchRootMoved, WatchRootUnreadable, WatchDirectoryLimit:
			reason = true
		}
	}
	if (path || reason) && absolute(ev.Path, path) && absolute(ev.From, from) && reason == (ev.Reason != "") {
		return nil
	}
	return fmt.Errorf("guest sent an unusable event of type %q of a watch", Shorten(string(ev.Type), 20))
}

// absolute reports whether a path is absolute if one is expected, and otherwise empty.
func absolute(path []byte, expected bool) bool {
	if !expected {
		return len(path) == 0
	}
	return len(path) > 0 && path[0] == '/'
}

// WatchStream is the stream of a watch.
type WatchStream struct {
	Started WatchStarted

	response *response
	lines    *bufio.Scanner
	done     error // of all further reads
}

// Watch begins or resumes a watch. Errors: CodeNotFound, CodeNotDirectory, CodeNotPermitted,
// CodeWatchLimit, CodeInvalid.
func (c *Client) Watch(ctx context.Context, spec WatchSpec) (*WatchStream, error) {
	a, err := c.send(ctx, request{method: http.MethodPost, route: RouteWatch, json: spec, wait: watchWait, dedicated: true})
	if err != nil {
		return nil, err
	}
	s := &WatchStream{response: a, lines: newLines(a)}
	a.watch.set(c.timeout)
	line, err := s.line()
	a.watch.pause()
	if err == nil && (line.Started == nil || !isWatchID(line.Started.Watch) || line.Started.Directories < 0 || line.Started.Unreadable < 0) {
		err = errors.New("guest sent an unusable beginning of a watch")
	}
	if err != nil {
		a.Close()
		return nil, err
	}
	s.Started = *line.Started
	return s, nil
}

// line returns the next line.
func (s *WatchStream) line() (line WatchLine, err error) {
	if !s.lines.Scan() {
		return line, lost(cmp.Or(s.lines.Err(), io.EOF))
	}
	if err := json.Unmarshal(s.lines.Bytes(), &line); err != nil {
		return line, fmt.Errorf("guest sent an unusable line of a watch: %w", err)
	}
	return line, nil
}

// Next waits for the next events and returns as many as the guest had, in their order. After
// WatchStopped it returns io.EOF. A stream that ends without it returns ErrLost (wrapped).
func (s *WatchStream) Next() ([]WatchEvent, error) {
	if s.done != nil {
		return nil, s.done
	}
	events, err := s.next()
	if err != nil {
		s.fail(err)
		return nil, err
	}
	if events[len(events)-1].Type == WatchStopped {
		s.fail(io.EOF)
	}
	// Events use memory of the guest like requests, so it is trimmed before a sleep.
	s.response.client.requests.Add(1)
	return events, nil
}

func (s *WatchStream) next() ([]WatchEvent, error) {
	line, err := s.line()
	if err == nil && len(line.Events) == 0 {
		err = errors.New("guest sent a line of a watch without events")
	}
	for i := range line.Events {
		ev := &line.Events[i]
		if err == nil {
			err = ev.validate()
		}
		if err == nil && ev.Type == WatchStopped && i < len(line.Events)-1 {
			err = errors.New("guest sent events after the end of a watch")
		}
	}
	return line.Events, err
}

func (s *WatchStream) fail(err error) {
	s.done = err
	s.response.Close()
}

// Close ends the stream. It may be called more than once and while Next waits. The guest keeps
// the watch for some time, so that it can be resumed.
func (s *WatchStream) Close() error { return s.response.Close() }
