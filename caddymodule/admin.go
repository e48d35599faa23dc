package caddymodule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"go.uber.org/zap"

	"github.com/doze-run/doze/egress"
)

func init() {
	caddy.RegisterModule(Admin{})
}

// Admin adds routes to Caddy's admin endpoint, which `doze reload`, `doze validate` and
// `doze backup-node` use.
//
//   - POST /doze/adapt?filename=PATH adapts a configuration in the environment of this
//     process, and returns {"result": …, "warnings": […]}. Content-Type names the
//     adapter as for /load; files that the configuration imports are relative to PATH.
//   - POST /doze/check takes the JSON of the app `doze` and returns 200 if the
//     running node could use it: it changes nothing that only a restart can change, and its
//     policies exist and accept their configurations.
//   - GET /doze/backup returns a backup of the node's data: see package backup. With
//     without_key=true it omits the sealing key, the token and Caddy's files.
type Admin struct{}

// CaddyModule returns the Caddy module information.
func (Admin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.doze", New: func() caddy.Module { return new(Admin) }}
}

// Routes implements caddy.AdminRouter.
func (Admin) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		{Pattern: "/doze/adapt", Handler: caddy.AdminHandlerFunc(handleAdapt)},
		{Pattern: "/doze/check", Handler: caddy.AdminHandlerFunc(handleCheck)},
		{Pattern: "/doze/backup", Handler: caddy.AdminHandlerFunc(handleBackup)},
	}
}

// maxConfig bounds a configuration.
const maxConfig = 16 << 20

// readConfig reads the body of a POST.
func readConfig(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if r.Method != http.MethodPost {
		return nil, caddy.APIError{HTTPStatus: http.StatusMethodNotAllowed, Err: errors.New("method not allowed; use POST")}
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxConfig))
	if err != nil {
		return nil, badRequest(err)
	}
	return body, nil
}

func badRequest(err error) error {
	return caddy.APIError{HTTPStatus: http.StatusBadRequest, Err: err}
}

func handleAdapt(w http.ResponseWriter, r *http.Request) error {
	body, err := readConfig(w, r)
	if err != nil {
		return err
	}
	mediaType, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return badRequest(fmt.Errorf("invalid Content-Type: %w", err))
	}
	_, name, _ := strings.Cut(mediaType, "/")
	result, warnings, err := Adapt(name, r.URL.Query().Get("filename"), body)
	if err != nil {
		return badRequest(err)
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(map[string]any{"result": json.RawMessage(result), "warnings": warnings})
}

// Adapt converts a configuration to JSON with one of Caddy's adapters. Files that the
// configuration imports are relative to filename.
func Adapt(adapter, filename string, config []byte) ([]byte, []caddyconfig.Warning, error) {
	a := caddyconfig.GetAdapter(adapter)
	if a == nil {
		return nil, nil, fmt.Errorf("unrecognized config adapter %q", adapter)
	}
	return a.Adapt(config, map[string]any{"filename": filename})
}

func handleCheck(w http.ResponseWriter, r *http.Request) error {
	body, err := readConfig(w, r)
	if err != nil {
		return err
	}
	a := new(App)
	if err := caddy.StrictUnmarshalJSON(body, a); err != nil {
		return badRequest(err)
	}
	cfg, err := a.nodeConfig()
	if err != nil {
		return badRequest(err)
	}
	held, err := loadOpenNode(cfg.Home)
	if err != nil {
		return badRequest(err)
	}
	if held == nil {
		return caddy.APIError{HTTPStatus: http.StatusServiceUnavailable, Err: errNotOpen}
	}
	defer func() {
		if _, err := nodes.Delete(cfg.Home); err != nil {
			caddy.Log().Error("failed to close the node", zap.Error(err))
		}
	}()
	change, err := held.Prepare(r.Context(), cfg)
	if err != nil {
		return badRequest(err)
	}
	change.Discard()
	return nil
}

// CheckPolicies checks the JSON of the app `doze` where no node runs: see
// egress.CheckPolicies, which documents compiler.
func CheckPolicies(ctx context.Context, app []byte, compiler string) (others []string, err error) {
	a := new(App)
	if err := caddy.StrictUnmarshalJSON(app, a); err != nil {
		return nil, err
	}
	settings, err := a.Egress.settings()
	if err != nil {
		return nil, err
	}
	return egress.CheckPolicies(ctx, settings, compiler)
}

var _ caddy.AdminRouter = (*Admin)(nil)
