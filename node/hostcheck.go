package node

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/doze-run/doze/runtime/doctor"
)

// checkHost checks, in parallel with the rest of Open, whether the host can run sandboxes.
// The channel receives the findings. Open checks Podman's storage itself.
func checkHost(ctx context.Context, cfg Config) <-chan []doctor.Finding {
	findings := make(chan []doctor.Finding, 1)
	go func() { // ends by itself: Check takes at most 20 seconds
		findings <- doctor.Check(ctx, doctor.Config{Home: cfg.Home, Cgroup: cfg.Cgroup, NetnsHelper: cfg.NetnsHelper, WithoutStorage: true, WithoutCheckpoint: true})
	}()
	return findings
}

// report logs the warnings. It returns an error with every remedy if no sandbox could
// run.
func report(findings []doctor.Finding, log *slog.Logger) error {
	var fatal []string
	for _, f := range findings {
		if f.OK {
			continue
		}
		if f.Level == doctor.LevelError {
			fatal = append(fatal, fmt.Sprintf("%s: %s (remedy: %s)", f.Name, f.Detail, f.Remedy))
			continue
		}
		log.Warn("host check failed", "check", f.Name, "detail", f.Detail, "remedy", f.Remedy)
	}
	if len(fatal) > 0 {
		return fmt.Errorf("no sandbox can run on this host: %s", strings.Join(fatal, "; "))
	}
	return nil
}
