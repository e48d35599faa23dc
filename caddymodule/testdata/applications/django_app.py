"""A form with Django's CSRF protection: default settings, or PROXY=1 for those behind a proxy with TLS."""

import os
import sys

from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpResponse
from django.middleware.csrf import get_token
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

options = {"DEBUG": True}
if os.environ.get("PROXY"):
    options = {
        "DEBUG": False,
        "ALLOWED_HOSTS": ["*"],
        "SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https"),
        "SECURE_SSL_REDIRECT": True,
        "CSRF_COOKIE_SECURE": True,
    }

settings.configure(
    SECRET_KEY="for tests",
    ROOT_URLCONF=__name__,
    MIDDLEWARE=[
        "django.middleware.security.SecurityMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
    ],
    **options,
)


def form(request):
    if request.method == "POST":
        return HttpResponse("posted to " + request.build_absolute_uri())
    return HttpResponse(get_token(request))


@csrf_exempt
def hook(request):
    return HttpResponse("hooked")


urlpatterns = [path("", form), path("hook", hook)]

execute_from_command_line([sys.argv[0], "runserver", "--noreload", "127.0.0.1:" + os.environ["PORT"]])
