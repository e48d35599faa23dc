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
		r.Requests++
	}
	r.Seconds = time.Since(began).Seconds()
	return r, nil
}

// errAllSeen ends a watch that has reported all files.
var errAllSeen = errors.New("all files were reported")

// watchFiles has files made in a watched folder of a sandbox, and calls created for each one
// that is reported, with the time since it was made. lost are the events that were reported as
// lost.
func (n *node) watchFiles(ctx context.Context, id, folder string, t task, created func(after time.Duration)) (lost uint64, err error) {
	if err := n.exec(ctx, id, "mkdir", "-p", folder); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t.Do, t.To = "files", folder
	made := make(chan error, 1)
	seen := 0
	err = n.API.Watch(ctx, id, folder, client.WatchOptions{}, func(c client.Change) error {
		switch {
		case c.Watching != nil:
			go func() { // ends with the program, or ctx
				_, err := n.client(ctx, id, t)
				if err != nil {
					cancel(err)
				}
				made <- err
			}()
		case c.Overflow != nil:
			lost += max(c.Overflow.Dropped, 1)
			return errAllSeen
		case c.Event != nil && c.Event.Type == types.FileEventTypeCreate:
			at, err := strconv.ParseInt(path.Base(c.Event.Path), 10, 64)
			if err != nil {
				return err
			}
			created(time.Since(time.Unix(0, at)))
			if seen++; seen == t.Count {
				return errAllSeen
			}
		}
		return nil
	})
	if err != errAllSeen {
		return lost, errors.Join(err, context.Cause(ctx))
	}
	return lost, <-made
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
		files, began := 0, time.Now()
		missed, err := b.node.watchFiles(ctx, b.id, folder(), task{Count: burstFiles}, func(time.Duration) { files++ })
		if err != nil {
			return nil, err
		}
		if missed == 0 && files != burstFiles {
			return nil, fmt.Errorf("%d of %d files were reported, and none as lost", files, burstFiles)
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
