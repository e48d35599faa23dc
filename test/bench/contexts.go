package main

import (
	"context"
	"fmt"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// value executes 1 + 1 in the default context of Python.
func (n *node) value(ctx context.Context, id string) error {
	r, err := n.API.RunCode(ctx, id, client.RunCodeRequest{Context: "python", Code: "1 + 1"})
	if err == nil && (len(r.Results) != 1 || r.Results[0].Data["text/plain"] != "2") {
		err = fmt.Errorf("1 + 1 is %+v", r)
	}
	return err
}

// awaitSpare returns when the warm interpreter of a sandbox can execute code: it has been
// started, and the node has connected to it and removed its connection file.
func (n *node) awaitSpare(ctx context.Context, id string) error {
	return poll(ctx, 50*time.Millisecond, func() (bool, error) {
		r, err := n.API.Exec(ctx, id, client.ExecRequest{Command: types.Command{Command: "pgrep -f '[i]pykernel' >/dev/null && ! ls /tmp/doze-kernel-*.json 2>/dev/null"}})
		return r.ExitCode == 0, err
	})
}

// measureContexts measures code in the default context of Python: warm, and the first code of
// a sandbox that has just been started, with and without a warm interpreter.
func measureContexts(ctx context.Context, b *bench) ([]row, error) {
	create := func(name string, warm ...types.Language) (string, error) {
		sb, _, err := b.node.API.Create(ctx, types.CreateSandboxRequest{Name: name, Image: "python", SleepAfter: new(types.Duration), Warm: warm})
		return sb.ID, err
	}
	once := func(id string) (float64, error) {
		began := time.Now()
		err := b.node.value(ctx, id)
		return ms(time.Since(began)), err
	}
	first := func(warm ...types.Language) (p50s, all spread, err error) {
		round := 0
		return inRounds(func() (s spread, err error) {
			for range b.count(10) {
				round++
				id, err := create(fmt.Sprintf("first-%d-%d", len(warm), round), warm...)
				if err != nil {
					return nil, err
				}
				if len(warm) > 0 {
					if err := b.node.awaitSpare(ctx, id); err != nil {
						return nil, err
					}
				}
				took, err := once(id)
				if err != nil {
					return nil, err
				}
				s = append(s, took)
				if err := b.node.API.Delete(ctx, id); err != nil {
					return nil, err
				}
			}
			return s, nil
		})
	}
	id, err := create("contexts")
	if err != nil {
		return nil, err
	}
	if err := b.node.value(ctx, id); err != nil {
		return nil, err
	}
	var rows []row
	p50s, all, err := inRounds(func() (spread, error) {
		return repeat(ctx, b.count(200), nil, func() error { return b.node.value(ctx, id) })
	})
	if err != nil {
		return nil, err
	}
	rows = append(rows, timesRow("`1 + 1` in a Python context", "p50 ≤ 10 ms", timesBars{p50: 10}, p50s, all))
	if p50s, all, err = first(); err != nil {
		return nil, err
	}
	rows = append(rows, timesRow("first code of a sandbox in Python, which starts the interpreter", "p50 ≤ 1,500 ms", timesBars{p50: 1500}, p50s, all))
	if p50s, all, err = first(types.LanguagePython); err != nil {
		return nil, err
	}
	return append(rows, timesRow("first code of a sandbox with a warm interpreter", "p50 ≤ 300 ms", timesBars{p50: 300}, p50s, all)), nil
}
