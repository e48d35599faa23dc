package api

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// defaultExclude has the directories that watches and searches skip by default: they are
// large, and most clients do not need them.
var defaultExclude = []string{".git", "node_modules"}

type watchInput struct {
	SandboxPath
	Exchange
	FilePath
	Recursive   bool     `query:"recursive" default:"true" doc:"Whether to watch all directories below"`
	Include     []string `query:"include,explode" maxItems:"32" doc:"Only report files that match one of these patterns; repeat the parameter for several. Renamed and deleted directories are always reported"`
	Exclude     []string `query:"exclude,explode" maxItems:"32" doc:"Neither report nor visit what matches one of these patterns. Default: .git and node_modules; an empty value excludes nothing"`
	LastEventID string   `header:"Last-Event-ID" maxLength:"64" doc:"Id of the event after which the stream resumes; send the same parameters"`
}

func (a *API) registerWatch() {
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/files/watch", id: "watch-files", tag: "files",
		summary: "Watch a directory or a file for changes, as server-sent events",
		description: "Wakes the sandbox, but neither keeps it awake nor wakes it again: nothing changes while it sleeps, and resuming waits until it runs. " +
			"The first event is `watching`; every change after it is reported by an `event`, or as lost by `overflow`: then list the directory. " +
			"Directories that are new are followed, with a `create` for each file in them. `stopped` is the last event, also when the sandbox is stopped. " +
			"A broken stream can be resumed with Last-Event-ID for about a minute in which the sandbox runs. " +
			"A pattern is matched with the path below the directory: `*`, `?` and `[a-z]` within a component, `**` for any number of components. " +
			"Without a slash it matches at any depth, and a directory that matches includes everything below it. " +
			"A sandbox has at most 16 watches with 32,768 directories.",
		codes:     slices.Concat(wakeCodes, []problem.Code{problem.PathNotFound, problem.PathNotDirectory, problem.PathNotPermitted, problem.WatchLimitExceeded, problem.StreamLimitExceeded}),
		responses: map[int]*huma.Response{http.StatusOK: {Description: "The changes, until the watch or the sandbox ends", Content: map[string]*huma.MediaType{}}},
		events:    map[string]any{"watching": types.WatchStarted{}, "event": types.FileEvent{}, "overflow": types.WatchOverflow{}, "stopped": types.WatchStopped{}},
	}, withSandbox(a, a.watchFiles))
}

// spec returns the watch of a request.
func (in *watchInput) spec() (spec guest.WatchSpec, err error) {
	if err := checkPath("query.path", in.Path); err != nil {
		return spec, err
	}
	if !utf8.ValidString(in.Path) {
		return spec, invalid("query.path", "is not UTF-8", "watch a directory above it")
	}
	query := in.r.URL.Query()
	spec = guest.WatchSpec{Path: in.Path, Recursive: in.Recursive, Include: query["include"], Exclude: query["exclude"]}
	switch {
	case spec.Exclude == nil:
		spec.Exclude = defaultExclude
	case len(spec.Exclude) == 1 && spec.Exclude[0] == "":
		spec.Exclude = nil
	}
	for name, list := range map[string][]string{"include": spec.Include, "exclude": spec.Exclude} {
		_, err := guest.ParsePatterns(list)
		if bad, ok := errors.AsType[*guest.PatternError](err); ok {
			return spec, invalid(fmt.Sprintf("query.%s[%d]", name, bad.Index), validText(bad.Reason, maxGuestMessage), bad.Want)
		}
	}
	if in.LastEventID != "" {
		if spec.Since, err = guest.ParseWatchCursor(in.LastEventID); err != nil {
			return spec, invalid("header.Last-Event-ID", validText(err.Error(), maxGuestMessage), "send the id of the last event that you have")
		}
	}
	return spec, nil
}

func (a *API) watchFiles(ctx context.Context, in *watchInput, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	spec, err := in.spec()
	if err != nil {
		return nil, err
	}
	if err := a.streams.acquire(ctx, 1); err != nil {
		return nil, err
	}
	var w *sandbox.FileWatch
	if in.LastEventID == "" { // else it may wait for long
		if w, err = a.cfg.Sandboxes.WatchFiles(ctx, sb.ID, spec); err != nil {
			return nil, fromGuest(err)
		}
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		a.serveEvents(in.Exchange, func(s *eventStream) {
			if w == nil {
				w, err = a.cfg.Sandboxes.WatchFiles(s.ctx, sb.ID, spec)
			}
			if err == nil {
				err = sendWatch(s, w, spec)
			}
			switch stopped, ok := errors.AsType[*sandbox.StoppedError](err); {
			case ok:
				s.send("stopped", "", watchStoppedOf(stopped))
			case err != nil:
				s.fail(fromGuest(err))
			}
		})
		if w != nil {
			w.Close()
		}
	}}, nil
}

// sendWatch sends events until the watch has ended, which returns nil, or an error.
func sendWatch(s *eventStream, w *sandbox.FileWatch, spec guest.WatchSpec) error {
	started := watchStartedOf(spec, w.Started())
	if err := s.send("watching", started.Cursor, started); err != nil {
		return err
	}
	for {
		events, err := w.Next(s.ctx)
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = s.sendAll(len(events), func(i int) (event, id string, data any) { return watchEventOf(w.Started().Watch, events[i]) })
		}
		if err != nil {
			return err
		}
	}
}

func watchStartedOf(spec guest.WatchSpec, started guest.WatchStarted) types.WatchStarted {
	return types.WatchStarted{
		Path:        spec.Path,
		Recursive:   spec.Recursive,
		Include:     append([]string{}, spec.Include...),
		Exclude:     append([]string{}, spec.Exclude...),
		Resumed:     started.Resumed,
		Directories: started.Directories,
		Unreadable:  started.Unreadable,
		Cursor:      guest.WatchCursor{Watch: started.Watch, Seq: started.Seq}.String(),
	}
}

// watchEventOf converts an event of the guest to the name, id and data of a server-sent event.
func watchEventOf(watch string, ev guest.WatchEvent) (name, id string, data any) {
	cursor := guest.WatchCursor{Watch: watch, Seq: ev.Seq}.String()
	switch ev.Type {
	case guest.WatchStopped:
		return "stopped", "", types.WatchStopped{Reason: types.WatchStopReason(ev.Reason), Detail: stopDetails[ev.Reason]}
	case guest.WatchOverflow:
		o := types.WatchOverflow{Reason: types.WatchOverflowReason(ev.Reason), Detail: overflowDetails[ev.Reason], Dropped: ev.Dropped, Cursor: cursor}
		o.Path, _, o.PathEncoding = encodePaths(ev.Path, nil)
		return "overflow", cursor, o
	}
	e := types.FileEvent{Type: types.FileEventType(ev.Type), IsDir: ev.IsDir, Cursor: cursor}
	e.Path, e.From, e.PathEncoding = encodePaths(ev.Path, ev.From)
	return "event", cursor, e
}

var overflowDetails = map[guest.WatchReason]string{
	guest.WatchQueueFull:      "files changed faster than the sandbox could record; list the directory",
	guest.WatchSlowClient:     "files changed faster than the client read; list the directory",
	guest.WatchCursorExpired:  "the sandbox has discarded the changes after Last-Event-ID; list the directory",
	guest.WatchPathUnreadable: "the directory cannot be read: changes in it are not reported",
}

var stopDetails = map[guest.WatchReason]string{
	guest.WatchRootDeleted:    "the watched directory was deleted",
	guest.WatchRootMoved:      "the watched directory was moved; watch its new path",
	guest.WatchRootUnreadable: "changes were lost, and the watched directory cannot be read again: a directory above it may have moved, or the sandbox may have no open files left",
	guest.WatchDirectoryLimit: "a new directory exceeds the limits of watches; exclude some directories",
}

// encodePaths returns two paths in an encoding that both permit.
func encodePaths(path, from []byte) (encodedPath, encodedFrom string, encoding types.Encoding) {
	if utf8.Valid(path) && utf8.Valid(from) {
		return string(path), string(from), ""
	}
	return base64.StdEncoding.EncodeToString(path), base64.StdEncoding.EncodeToString(from), types.EncodingBase64
}

// watchStoppedOf describes the end of the sandbox.
func watchStoppedOf(e *sandbox.StoppedError) types.WatchStopped {
	return types.WatchStopped{
		Reason: types.WatchStopReasonSandboxEnded, State: types.State(e.State), StateReason: types.StateReason(e.Reason), Detail: e.Error(),
	}
}
