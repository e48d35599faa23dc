package main

import (
	"context"
	"fmt"
	"io"
	"time"
)

const (
	filesBytes  = 1 << 30
	filesRounds = 5
	filesBar    = 300 // MB/s
	filesPath   = "/srv/transfer"
)

// measureFiles measures how fast one file passes through the API into a sandbox and out of
// it. Client and node share the machine.
func measureFiles(ctx context.Context, b *bench) ([]row, error) {
	size := int64(b.count(filesBytes))
	var up, down spread
	for range filesRounds {
		begun := time.Now()
		if _, err := b.node.API.WriteFile(ctx, b.id, filesPath, 0, io.LimitReader(zeros{}, size)); err != nil {
			return nil, err
		}
		up = append(up, float64(size)/1e6/time.Since(begun).Seconds())
		begun = time.Now()
		file, err := b.node.API.ReadFile(ctx, b.id, filesPath)
		if err != nil {
			return nil, err
		}
		n, err := io.Copy(io.Discard, file)
		file.Close()
		if err == nil && n != size {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, fmt.Errorf("got %d bytes of %d: %w", n, size, err)
		}
		down = append(down, float64(size)/1e6/time.Since(begun).Seconds())
	}
	rate := func(figure string, s spread) row {
		return row{
			Figure: figure, Bar: fmt.Sprintf("≥ %d MB/s", filesBar), Measured: s.text("%.0f") + " MB/s", Met: s.median() >= filesBar,
			Values: values{}.add("mb_s", s), Note: "HTTP/1.1 and TLS; client and node on the same 2 cores",
		}
	}
	return []row{rate("upload of a file of 1 GiB through the API", up), rate("download of a file of 1 GiB through the API", down)}, nil
}

// zeros is an endless stream of zero bytes.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
