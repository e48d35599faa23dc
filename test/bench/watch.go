package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

const (
	// watchedFolder has a folder for each round.
	watchedFolder = "/srv/watched"
	burstFiles    = 10_000
	// eventPause lets each event arrive before the next file is made.
	eventPause = 2 * time.Millisecond
	// eventWait bounds the wait for the last events. It decides only how long a loss that is not reported takes.
	eventWait = time.Minute
)

// makeFiles makes files in the folder t.To, each named by the time just before, with
// t.Duration in between.
func makeFiles(_ context.Context, t task) (r clientResult, err error) {
	began := time.Now()
	for range t.Count {
		time.Sleep(t.Duration)
		name := filepath.Join(t.To, strconv.FormatInt(time.Now().UnixNano(), 10))
		if err := os.WriteFile(name, []byte("content"), 0o644); err != nil {
			return r, err
		}
		r.Files = append(r.Files, filepath.Base(name))
	}
	r.Seconds = time.Since(began).Seconds()
	return r, nil
}

// errAllSeen ends a watch that has reported all files.
var errAllSeen = errors.New("all files were reported")

// watchFiles has files made in a watched folder of a sandbox, and calls created for each one
// that is reported, with the time since it was made. lost are the events that were reported as
// lost; a file without an event or such a report is an error.
func (n *node) watchFiles(ctx context.Context, id, folder string, t task, created func(after time.Duration)) (lost uint64, err error) {
	if err := n.exec(ctx, id, "mkdir", "-p", folder); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t.Do, t.To = "files", folder
	var made []string
	written := make(chan error, 1)
	reported := map[string]bool{}
	err = n.API.Watch(ctx, id, folder, client.WatchOptions{}, func(c client.Change) error {
		switch {
		case c.Watching != nil:
			go func() { // ends with ctx
				r, err := n.client(ctx, id, t)
				made = r.Files
				written <- err
				if err == nil && pause(ctx, eventWait) == nil {
					err = fmt.Errorf("events are missing %s after the last of %d files", eventWait, t.Count)
				}
				cancel(err)
			}()
		case c.Overflow != nil:
			lost += max(c.Overflow.Dropped, 1)
			return errAllSeen
		case c.Event != nil && c.Event.Type == types.FileEventTypeCreate:
			name := path.Base(c.Event.Path)
			at, err := strconv.ParseInt(name, 10, 64)
			if err != nil {
				return err
			}
			created(time.Since(time.Unix(0, at)))
			if reported[name] = true; len(reported) == t.Count {
				return errAllSeen
			}
		}
		return nil
	})
	if err != errAllSeen {
		return lost, errors.Join(err, context.Cause(ctx))
	}
	if err := <-written; err != nil || lost > 0 {
		return lost, err
	}
	for _, name := range made {
		if !reported[name] {
			return 0, fmt.Errorf("no event for the file %s", name)
		}
	}
	return 0, nil
}

// measureWatch: from the creation of a file to its event, one by one and in a burst.
func measureWatch(ctx context.Context, b *bench) ([]row, error) {
	rounds := 0
	folder := func() string {
		rounds++
		return fmt.Sprint(watchedFolder, "/", rounds)
	}
	p50s, all, err := inRounds(func() (s spread, err error) {
		_, err = b.node.watchFiles(ctx, b.id, folder(), task{Count: b.count(200), Duration: eventPause}, func(after time.Duration) { s = append(s, ms(after)) })
		return s, err
	})
	if err != nil {
		return nil, err
	}
	var lost uint64
	var seconds spread
	for range latencyRounds {
		began := time.Now()
		missed, err := b.node.watchFiles(ctx, b.id, folder(), task{Count: burstFiles}, func(time.Duration) {})
		if err != nil {
			return nil, err
		}
		lost += missed
		seconds = append(seconds, time.Since(began).Seconds())
	}
	return []row{
		timesRow("file event to the client of its stream (HTTPS)", "p50 ≤ 5 ms", timesBars{p50: 5}, p50s, all),
		{
			Figure:   "burst of 10,000 new files, written and reported",
			Bar:      "none lost, or reported as lost",
			Measured: fmt.Sprintf("%d lost, %s s", lost, seconds.text("%.2f")),
			Met:      true, // else it fails
			Values:   values{"lost": float64(lost)}.add("seconds", seconds),
		},
	}, nil
}
