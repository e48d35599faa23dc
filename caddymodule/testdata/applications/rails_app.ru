# Forms, a session and Action Cable in one file, with the defaults of RAILS_ENV:
# development allows only hosts of this machine, production any host, over TLS.

require "action_controller/railtie"
require "action_cable/engine"

class Application < Rails::Application
  config.load_defaults Rails::VERSION::STRING.to_f
  config.root = __dir__
  config.eager_load = false
  config.logger = Logger.new($stdout)
  config.secret_key_base = "for tests" * 8
  config.force_ssl = Rails.env.production? # as `rails new` writes it
  config.session_store :cookie_store, key: "session"

  routes.append do
    get "/", to: "pages#form"
    post "/login", to: "pages#login"
    get "/me", to: "pages#me"
  end
end

Application.initialize!
ActionCable.server.config.cable = { "adapter" => "async" }

class PagesController < ActionController::Base
  protect_from_forgery with: :exception

  def form
    render plain: form_authenticity_token
  end

  def login
    session[:user] = "alice"
    redirect_to action: :me
  end

  def me
    render plain: "user #{session[:user]} at #{request.base_url}"
  end
end

run Application
