package server_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/testkit"
)

func TestOpenSessionsAndTerminalsAreLimited(t *testing.T) {
	const limit = 128
	env := withShell(t, "sh")
	for name, kind := range map[string]struct {
		open  func(c *guest.Client, id string) error
		close func(c *guest.Client, id string) error
	}{
		"terminals": {
			func(c *guest.Client, id string) error {
				_, err := c.OpenTerminal(t.Context(), guest.TerminalSpec{ID: id, Command: guest.Command{Argv: []string{"cat"}}})
				return err
			},
			func(c *guest.Client, id string) error {
				_, err := c.CloseTerminal(t.Context(), id, time.Minute)
				return err
			},
		},
		"sessions": {
			func(c *guest.Client, id string) error {
				_, err := c.OpenSession(t.Context(), guest.SessionSpec{ID: id, Env: env})
				return err
			},
			func(c *guest.Client, id string) error {
				_, err := c.CloseSession(t.Context(), id, time.Minute)
				return err
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, nil)
			for i := range limit {
				testkit.NoError(t, "open", kind.open(c, strconv.Itoa(i)))
			}
			wantCode(t, kind.open(c, "more"), guest.CodeTooMany, strconv.Itoa(limit))
			wantCode(t, kind.open(c, "0"), guest.CodeExists, "0")
			testkit.NoError(t, "close", kind.close(c, "7"))
			testkit.NoError(t, "open", kind.open(c, "more"))
			wantCode(t, kind.open(c, "7"), guest.CodeTooMany, strconv.Itoa(limit))
		})
	}
}
