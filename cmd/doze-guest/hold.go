package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// holdTimeout covers the whole conversation with the guest.
const holdTimeout = 10 * time.Second

// hold asks the guest whose sockets are in runDir to keep the sandbox awake.
func hold(runDir, text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 || d > guest.MaxHold {
		return fmt.Errorf("invalid duration %q; write it like 10m or 1h30m, at most %s", text, guest.MaxHold)
	}
	conn, err := net.DialTimeout("unix", filepath.Join(runDir, guest.SandboxSocketName), holdTimeout)
	if err != nil {
		return fmt.Errorf("reach the guest of this sandbox: %w", err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(holdTimeout))
	fmt.Fprintf(conn, "POST %s?for=%s HTTP/1.1\r\nHost: guest\r\nContent-Length: 0\r\n\r\n", guest.RouteHold, url.QueryEscape(d.String()))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return fmt.Errorf("request the hold from the guest of this sandbox: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	refusal := &guest.Error{}
	b, _ := io.ReadAll(io.LimitReader(resp.Body, guest.MaxFrame))
	if json.Unmarshal(b, refusal) != nil || refusal.Message == "" {
		return fmt.Errorf("the guest of this sandbox responded %s", resp.Status)
	}
	return refusal
}
