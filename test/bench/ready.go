package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/doze-run/doze/api/types"
)

// readyPort is the port of the servers that are waited for.
const readyPort = 3001

// serveLate is a server that takes some time to start, as others do. It prints when it began
// to listen.
func serveLate(addr string) error {
	time.Sleep(50*time.Millisecond + rand.N(100*time.Millisecond))
	began := time.Now()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	defer l.Close()
	_, err = fmt.Println(began.UnixNano())
	if err == nil {
		_, err = l.Accept()
	}
	return err
}

// measureReady measures from the moment at which a server begins to listen to the response of
// the request that waits for its port. Both read the clock of the same kernel.
func measureReady(ctx context.Context, b *bench) ([]row, error) {
	once := func() (float64, error) {
		p, err := b.node.API.StartProcess(ctx, b.id, types.StartProcessRequest{
			Command: types.Command{Argv: []string{sandboxProgram, "listen", fmt.Sprint("127.0.0.1:", readyPort)}},
		})
		if err != nil {
			return 0, err
		}
		if _, err := b.node.API.WaitProcess(ctx, b.id, p.ID, types.ReadyCondition{Port: readyPort}); err != nil {
			return 0, err
		}
		responded := time.Now()
		ready, err := b.node.API.WaitProcess(ctx, b.id, p.ID, types.ReadyCondition{Log: `^\d+$`})
		if err != nil {
			return 0, err
		}
		var began int64
		if _, err := fmt.Sscan(ready.Line, &began); err != nil {
			return 0, fmt.Errorf("parse the time at which the server began to listen: %w", err)
		}
		_, err = b.node.API.StopProcess(ctx, b.id, p.ID, "")
		return ms(responded.Sub(time.Unix(0, began))), err
	}
	p50s, all, err := inRounds(func() (spread, error) {
		var s spread
		for range b.count(40) {
			took, err := once()
			if err != nil {
				return nil, err
			}
			s = append(s, took)
		}
		return s, nil
	})
	if err != nil {
		return nil, err
	}
	return []row{timesRow("wait for a port, from listen to the response", "p50 ≤ 5 ms", timesBars{p50: 5}, p50s, all)}, nil
}
