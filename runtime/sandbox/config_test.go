package sandbox_test

import (
	"errors"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

func TestConfigurationThatCannotWorkIsRefused(t *testing.T) {
	if err := sandbox.DefaultConfig().Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	for field, spoil := range map[string]func(*sandbox.Config){
		"sizes":                   func(c *sandbox.Config) { c.Sizes = nil },
		"size lite":               func(c *sandbox.Config) { c.Sizes["lite"] = sandbox.Limits{Memory: -1} },
		"default_size":            func(c *sandbox.Config) { c.DefaultSize = "huge" },
		"sleep_after":             func(c *sandbox.Config) { c.SleepAfter = time.Millisecond },
		"stop_after":              func(c *sandbox.Config) { c.StopAfter = -time.Second },
		"wake_timeout":            func(c *sandbox.Config) { c.WakeTimeout = 0 },
		"create_timeout":          func(c *sandbox.Config) { c.CreateTimeout = -1 },
		"stop_grace_period":       func(c *sandbox.Config) { c.StopGrace = -1 },
		"idle_cpu":                func(c *sandbox.Config) { c.IdleCPU = -1 },
		"max_sandboxes":           func(c *sandbox.Config) { c.MaxSandboxes = 0 },
		"max_waiters":             func(c *sandbox.Config) { c.MaxWaiters = -1 },
		"max_waiters_per_sandbox": func(c *sandbox.Config) { c.MaxWaitersPerSandbox = 0 },
		"size s: memory":          func(c *sandbox.Config) { c.Sizes["s"] = sandbox.Limits{Memory: 1} },
		"size s: cpus":            func(c *sandbox.Config) { c.Sizes["s"] = sandbox.Limits{CPUs: 0.001} },
		"size s: pids":            func(c *sandbox.Config) { c.Sizes["s"] = sandbox.Limits{PIDs: 2} },
		"size s: user_namespaces": func(c *sandbox.Config) {
			c.Sizes["s"] = sandbox.Limits{Quotas: sandbox.Quotas{UserNamespaces: 1 << 31}}
		},
		"allow_images": func(c *sandbox.Config) { c.Images.Allow = []string{"["} },
	} {
		cfg := sandbox.DefaultConfig()
		spoil(&cfg)
		var invalid *sandbox.InvalidError
		if err := cfg.Validate(); !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}
